"""A ledger, or a unit, as a process that a person or a supervisor starts and ends."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataplane import ColumnSchema, DataPlane, PartitionSpec
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.errors import HeadraceError
from headrace_storage.disk import DiskStorage
from headrace_storage.memory import MemoryStorage

SERVE = """
import sys
from headrace.dataplane.serve import serve_ledger, until_stopped
from headrace_storage.disk import DiskStorage
until_stopped(serve_ledger(sys.argv[1], DiskStorage(DiskStorage.Settings(path=sys.argv[2]))))
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT], ids=lambda number: number.name)
def test_it_says_where_it_serves_and_ends_without_a_word_and_without_leaving_anything(
    tmp_path: Path, number: signal.Signals
) -> None:
    values = tmp_path / "values"
    values.mkdir()
    command = [sys.executable, "-c", SERVE, f"ipc://{tmp_path}/ledger", str(values)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        plane = DataPlane(process.stdout.readline().strip())
        partition = plane.create(PartitionSpec("p", {"a": ColumnSchema("float32")}, {"x": ("a",)}))
        partition.put({"a": np.zeros(1 << 20, np.float32)})
        plane.close()
        assert list(values.iterdir())
        process.send_signal(number)
        out, error = process.communicate(timeout=30)
    assert (process.returncode, out, error) == (0, "", "")
    assert not list(values.iterdir())


def test_what_cannot_be_served_ends_its_process_with_the_error_in_words(tmp_path: Path) -> None:
    command = [sys.executable, "-c", SERVE, f"ipc://{tmp_path}/ledger", "/nowhere/at/all"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "values cannot be kept in /nowhere/at/all" in ended.stderr
    assert "  fix:  " in ended.stderr
    assert "Traceback" not in ended.stderr


KEPT: Any = MemoryStorage(None)
AT = "ipc:///nowhere/served"


@pytest.mark.parametrize(
    ("how", "answer"),
    [
        *(({"storage": KEPT, "capacity": given}, "a capacity of") for given in ("8GB", -1, 1.5, True, None)),
        ({"shards": 0}, "shard 0 of 0"),
        ({"shard": 2, "shards": 2}, "shard 2 of 2"),
        ({"storage": MemoryStorage}, "in the place of a storage"),
        ({"storage": None, "ledger": AT}, "in the place of a storage"),
        ({"storage": KEPT, "ledger": []}, "a storage unit without a ledger"),
        ({"storage": DiskStorage(DiskStorage.Settings(path="/nowhere/at/all"))}, "values cannot be kept in"),
    ],
)
def test_what_cannot_be_served_is_refused_before_it_is(how: dict[str, Any], answer: str) -> None:
    serve: Any = serve_unit if "ledger" in how else serve_ledger
    with pytest.raises(HeadraceError, match=answer):
        asyncio.run(serve(AT, **how))
