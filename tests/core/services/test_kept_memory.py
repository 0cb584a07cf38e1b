"""What a process that receives large messages does with memory it has freed."""

from __future__ import annotations

import subprocess
import sys

import pytest

FAULTS = """
import resource
from headrace.freed_memory import keep_freed_memory
{begin}
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    held = [bytearray(b"x") * (8 << 20) for _ in range(3)]
    del held
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
faults(), faults()
print(faults())
"""


def faults(begin: str) -> int:
    """Pages that a process has made for its third 24 MiB, of 4096 bytes or more each."""
    command = [sys.executable, "-c", FAULTS.format(begin=begin)]
    return int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is kept")
def test_freed_memory_that_is_kept_is_used_again_and_none_is_kept_unless_asked_for() -> None:
    assert faults("keep_freed_memory(64 << 20)") < 50
    assert faults("") > 1000
