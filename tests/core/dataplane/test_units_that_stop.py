"""A storage unit whose process is stopped or dead answers nobody, and its connections stay as they are."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec
from headrace.errors import DeadlineError, LostRowsError
from headrace.wire import ipc_address
from support.plane_world import World

SPEC = PartitionSpec("p", {"x": ColumnSchema("float32")}, {"train": ("x",)})
SERVE = """
import sys
from headrace.dataplane import ledger, unit, units
from headrace.dataplane.serve import serve_ledger, serve_unit, until_stopped
from headrace_storage.memory import MemoryStorage
units.SILENT_SECONDS, ledger.WATCH_SECONDS, unit.BEAT_SECONDS = 1.0, 0.02, 0.05
address, *ledgers = sys.argv[1:]
until_stopped(serve_unit(address, MemoryStorage(None), ledger=ledgers[0]) if ledgers else serve_ledger(address))
"""


class Processes:
    """A ledger and two storage units."""

    def __init__(self, directory: Path) -> None:
        directory.chmod(0o700)
        self._running: list[subprocess.Popen[str]] = []
        ledger = self._start(ipc_address(str(directory), "ledger"))
        for name in ("unit-1", "unit-2"):
            self._start(ipc_address(str(directory), name), ledger)
        self.plane = DataPlane(ledger)

    def _start(self, *arguments: str) -> str:
        command = [sys.executable, "-c", SERVE, *arguments]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._running.append(process)
        assert process.stdout is not None
        return process.stdout.readline().strip()

    def signal(self, unit: int, number: signal.Signals) -> None:
        os.kill(self._running[unit].pid, number)

    def end_of(self, unit: int) -> tuple[int, str]:
        """Its exit status and what it said on stderr, when it ends by itself."""
        _, said = self._running[unit].communicate(timeout=30)
        return self._running[unit].returncode, said

    def close(self) -> None:
        self.plane.close()
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Processes]:
    monkeypatch.setattr("headrace.wire.blocking.TURN_SECONDS", 0.1)
    running = Processes(tmp_path)
    yield running
    running.close()


def put(partition: Partition, deadline: float = 60.0, once: str = "") -> int:
    (row,) = partition.put({"x": np.ones(1, np.float32)}, deadline=deadline, once=once).tolist()
    return int(row)


@pytest.mark.parametrize("how", [signal.SIGSTOP, signal.SIGKILL], ids=lambda how: how.name)
def test_a_put_to_a_unit_that_is_gone_goes_to_another_and_is_there_once(
    processes: Processes, how: signal.Signals
) -> None:
    partition = processes.plane.create(SPEC)
    processes.signal(1, how)
    row = put(partition, deadline=20)
    assert partition.moves == 1
    if how == signal.SIGSTOP:
        processes.signal(1, signal.SIGCONT)  # it finds the put, and is told that it is not in service any more
    assert partition.lease("train", 2, at_least=1).rows.tolist() == [row]
    with pytest.raises(DeadlineError, match="there were no 1 groups"):
        partition.lease("train", 1, deadline=0.5)


def test_a_unit_that_was_given_up_ends_with_the_reason_in_words(processes: Processes) -> None:
    partition = processes.plane.create(SPEC)
    processes.signal(1, signal.SIGSTOP)
    put(partition, deadline=20)
    assert partition.moves == 1, "it was given up"
    processes.signal(1, signal.SIGCONT)
    status, said = processes.end_of(1)
    assert status == 1
    assert said.startswith("RunError: the storage unit at ipc://")
    assert "was given up: it was silent too long" in said
    assert said.endswith("  fix:  start another one\n")
    assert len(said.splitlines()) == 2


def test_a_snapshot_of_a_unit_that_is_gone_ends_and_lets_the_others_delete(
    processes: Processes, tmp_path: Path
) -> None:
    partition = processes.plane.create(SPEC)
    put(partition)
    put(partition)
    processes.signal(1, signal.SIGSTOP)
    with pytest.raises(LostRowsError, match=r"snapshot names are lost: storage unit 1 is gone.*rows 1\n"):
        processes.plane.snapshot(tmp_path / "file", deadline=20)
    partition.drop([2])
    assert put(partition, deadline=20) == 3
    assert [stats.rows for stats in partition.unit_stats()] == [1]


def test_a_read_of_a_unit_that_is_given_up_meanwhile_ends_long_before_its_deadline(world: World) -> None:
    unit = world.unit()
    partition = world.plane().create(SPEC)
    for _ in range(7):
        put(partition)
    held = partition.lease("train", 7)
    world.lose(unit)
    began = world.clock.now
    lost = "storage unit 1 is gone, and with it what it kept of rows 1, 2, 3, 4, 5 and 2 more"
    with pytest.raises(LostRowsError) as told:
        partition.get(held, deadline=1000)
    assert told.value.message == lost
    assert world.clock.now - began < 10


@pytest.mark.parametrize("once", ["", "a name"])
def test_where_another_ledger_may_still_hear_of_it_only_a_put_with_a_name_goes_to_another_unit(once: str) -> None:
    world = World(shards=2)
    unit = world.unit()
    partition = world.plane().create(SPEC)
    world.unit()
    world.lose(unit)
    if once:
        put(partition, 1000, once)
        assert partition.stats().rows == 1
    else:
        with pytest.raises(DeadlineError, match="has not said what became of a put") as told:
            put(partition, 1000)
        assert "once=" in told.value.fix
    assert partition.moves == bool(once)
    world.close()
