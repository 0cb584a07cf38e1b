"""Whole runs over every weight transport: the same weights arrive, and nothing is left behind however a run ends."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from support.whole_runs import PHASE_TWO, alive, descendants, events, follow, pid_of

Start = Callable[..., Any]


def digests(run: Any) -> list[str]:
    return [event["digest"] for event in events(run, "version_published")]


def memory_files(pids: list[int]) -> int:
    """Segments that these processes have open or mapped."""
    found = 0
    for pid in pids:
        with suppress(OSError):  # it has ended
            found += Path(f"/proc/{pid}/maps").read_text().count("memfd:headrace-weights")
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    found += "memfd:headrace-weights" in os.readlink(link)
    return found


def test_a_synchronous_run_is_the_same_to_the_bit_over_every_transport(start: Start) -> None:
    found = {}
    for use in ("shared_memory", "zmq", "disk", "collective"):
        run = start(f"weights.use={use}", "staleness.max_staleness=0")
        assert run.wait() == 0, run.stderr
        assert audit_run(run.directory).ok
        found[use] = digests(run)
    assert len(found["zmq"]) > 5
    assert all(found[use] == found["zmq"] for use in found), found


def test_a_killed_run_leaves_no_weights_in_memory(start: Start) -> None:
    before = set(os.listdir("/dev/shm"))
    run = start("phase.rl.steps=100000", "weights.use=shared_memory")
    follow(run, "batch_trained", after=PHASE_TWO)
    below = descendants(run.process.pid)
    assert memory_files(below) > 0
    run.process.send_signal(signal.SIGKILL)
    run.wait()
    for pid in below:
        while alive([pid]):
            os.sched_yield()
    assert memory_files(below) == 0
    assert set(os.listdir("/dev/shm")) <= before


@pytest.mark.parametrize("use", ["shared_memory", "disk", "collective"])
def test_an_engine_that_is_killed_comes_back_with_the_current_weights(start: Start, use: str) -> None:
    run = start("phase.rl.steps=8", f"weights.use={use}")
    follow(run, "batch_trained", after=PHASE_TWO)
    os.kill(pid_of(run, "rollout-1"), signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    assert len([event for event in events(run, "node_started") if event["node"] == "rollout-1"]) == 2
    assert audit_run(run.directory).ok
