"""What a checkpoint takes from a run and gives back, and what becomes of it when storage is lost meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.contract import Batch
from headrace.errors import LostRowsError
from headrace.flow import FlowState
from headrace.flow.records import StoredGroup
from headrace.observe.epochs import standing_checkpoints
from headrace.observe.event_log import EventLog
from headrace.registry import PluginSpec
from headrace.run import checkpoint as checkpoints
from headrace.run import keeper as module
from headrace.run.checkpoint import Checkpoint
from headrace.run.directory import RunDirectory
from headrace.run.keeper import Keeper
from headrace.run.parts import PhaseRun
from support.desk import COLUMNS


class State(msgspec.Struct):
    """As much of a run's state as is looked at."""

    flow: FlowState
    version: int = 3
    phase: int = 0
    events: int = 17


def stored(*groups: int) -> FlowState:
    kept = tuple(StoredGroup(group=g, version=3, oldest=3, tokens=(1, 1)) for g in groups)
    return FlowState(version=3, next_group=9, stored=kept, unfinished=(), trained=0, dropped={})


def batch(rows: list[int]) -> Batch:
    return Batch(
        rows=np.array(rows, dtype=np.int64),
        columns={"reward": np.zeros(len(rows), np.float32), "version": np.full(len(rows), 3)},
    )


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _save(path: Path) -> None:
    path.mkdir()
    (path / "weights").write_bytes(b"weights")


RESTORED: Any = SimpleNamespace(
    prompts=4, samples=8, optimizer_steps=2, evaluations={0: {"evaluation/greedy_accuracy": 0.5}}, quarantine=[3]
)
"""As much of a run's state as is put back."""
PHASE: Any = SimpleNamespace(
    name="rl",
    batch=SimpleNamespace(group_size=2),
    algorithm=PluginSpec(role="algorithm", use="grpo", settings={}),
)


class Run:
    """The parts of a run that a keeper touches, and what it did to them, in order."""

    def __init__(self, directory: Path) -> None:
        self.did: list[Any] = []
        self.directory = RunDirectory(directory)
        self.log = EventLog(self.directory.events)
        self.lost = False
        self.kept = SimpleNamespace(keep=1)
        self.measured: dict[str, int] = {}
        self.attempts = SimpleNamespace(quarantine={8})
        self.displaced = 0
        self.evaluator = SimpleNamespace(results={})
        parts: Any = SimpleNamespace(
            job=SimpleNamespace(phases=[PHASE], checkpoint=self.kept),
            directory=self.directory,
            plane=self,
            trainer=self,
            save=self.save,
            journal=SimpleNamespace(emit=self.emit),
            measures=SimpleNamespace(restore=lambda **counted: self.measured.update(counted)),
            evaluator=self.evaluator,
            stage_plan=lambda began: SimpleNamespace(columns=COLUMNS),
            controller=SimpleNamespace(attempts=self.attempts, rows=self, open_rows=lambda flow, spec: self),
        )
        self.parts = parts
        self.keeper = Keeper(parts)

    def emit(self, kind: str, **fields: Any) -> None:
        self.did.append(kind)
        self.log.emit(kind, **fields)

    async def checkpoint(self) -> str:
        """One of this moment, always of the same version; its name."""
        events = self.log.count
        await self.keeper.write(State(stored(2), events=events))  # type: ignore[arg-type]  # as much as is looked at
        return f"version-00000003-event-{events:08d}"

    async def resume(self, name: str) -> None:
        """Another process goes on from a checkpoint."""
        self.log.close()
        self.log = EventLog.reopen(self.directory.events)
        events = int(name[-8:])
        self.log.emit("resumed", version=3, checkpoint=name, events=events, restarted=[])
        self.keeper = Keeper(self.parts)
        await self.keeper.restore(Checkpoint(self.directory.checkpoints / name, RESTORED))

    def for_checkpoint(self, rows: np.ndarray) -> dict[str, Any]:
        return {"partition": "rl", "columns": ("reward",), "units": rows[:, None]}

    async def get(self, partition: str, rows: np.ndarray, units: np.ndarray, columns: tuple[str, ...]) -> Batch:
        if self.lost:
            raise LostRowsError("a storage unit has not all of the rows it was asked for: row 4")
        assert units.tolist() == [[row] for row in rows.tolist()]
        self.did.append(("get", rows.tolist()))
        return batch(rows.tolist())

    async def put(self, partition: str, columns: Any, *, rows: np.ndarray) -> None:
        self.did.append(("put", rows.tolist()))

    async def save(self, path: Path, *, kind: str) -> None:
        self.did.append(("save", kind))
        _save(path)

    async def call(self, method: str, request: Any, **_: Any) -> None:
        self.did.append((method, request.path))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    found = Run(tmp_path)
    yield found
    found.log.close()


async def test_every_stored_row_is_kept_and_the_log_names_the_checkpoint_once_it_is_there(run: Run) -> None:
    await run.keeper.write(State(stored(2, 4)))  # type: ignore[arg-type]  # as much as is looked at
    assert run.did == [("get", [4, 5, 8, 9]), ("save", "resume"), "checkpoint_saved"]
    (name,) = names(run.directory.checkpoints)
    assert name == "version-00000003-event-00000017"
    assert names(run.directory.checkpoints / name) == ["manifest.json", "rows.bin", "state.json", "trainer"]


async def test_many_rows_are_kept_in_parts(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    await run.keeper.write(State(stored(2, 4)))  # type: ignore[arg-type]  # as much as is looked at
    assert run.did[:2] == [("get", [4, 5, 8]), ("get", [9])]


async def test_rows_that_storage_loses_meanwhile_cost_the_checkpoint_and_not_the_run(
    run: Run, caplog: pytest.LogCaptureFixture
) -> None:
    run.lost = True
    with caplog.at_level(logging.WARNING):
        await run.keeper.write(State(stored(2)))  # type: ignore[arg-type]  # as much as is looked at
    assert "no checkpoint of version 3: a storage unit has not all of the rows" in caplog.text
    assert run.did == []
    assert not run.directory.checkpoints.exists()


async def test_weights_rows_and_counters_come_back(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Checkpoint, "rows", lambda self: iter([batch([4, 5]), batch([8, 9])]))
    resumed = Checkpoint(tmp_path, RESTORED)
    await run.keeper.restore(resumed)
    flow: Any = None
    await run.keeper.put_back(PhaseRun(0, PHASE, "", resumed), flow)
    assert run.did == [
        ("restore", str(tmp_path / "trainer")),
        ("put", [4, 5]),
        ("put", [8, 9]),
    ]
    assert run.measured == {"prompts": 4, "samples": 8, "optimizer_steps": 2}
    assert run.evaluator.results == RESTORED.evaluations
    assert run.attempts.quarantine == {3, 8}


async def test_rows_that_are_put_back_are_put_again_when_a_unit_is_lost_that_had_them(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoint, "rows", lambda self: iter([batch([4, 5]), batch([8, 9])]))
    put = run.put

    async def put_and_lose(*told: Any, rows: np.ndarray) -> None:
        await put(*told, rows=rows)
        run.displaced += len(run.did) in (1, 4)

    monkeypatch.setattr(run, "put", put_and_lose)
    flow: Any = None
    await run.keeper.put_back(PhaseRun(0, PHASE, "", Checkpoint(tmp_path, RESTORED)), flow)
    assert run.did == [("put", [4, 5]), ("put", [8, 9])] * 3


# ---------------------------------------------------------------- which are kept


async def test_one_of_the_same_version_is_another_and_the_last_stays_as_it_was_until_the_log_names_the_new_one(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = await run.checkpoint()

    def killed(kind: str, **fields: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(run.parts.journal, "emit", killed)
    run.log.emit("version_retired", version=2)
    with pytest.raises(KeyboardInterrupt):
        await run.checkpoint()
    assert len(names(run.directory.checkpoints)) == 2
    assert standing_checkpoints(tmp_path) == [last]
    checkpoints.verify(run.directory.checkpoints / last)


async def test_the_last_is_removed_only_when_the_announcement_of_the_new_one_is_on_disk(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    last = await run.checkpoint()
    settled: list[list[str]] = []
    monkeypatch.setattr(checkpoints, "settle", lambda *_: settled.append(names(run.directory.checkpoints)))
    new = await run.checkpoint()
    assert run.did[-1] == "checkpoint_saved"
    assert settled == [[last, new]]
    assert names(run.directory.checkpoints) == [new]


async def test_a_resumed_run_counts_what_is_in_force_and_removes_what_it_made_void(run: Run, tmp_path: Path) -> None:
    run.kept.keep = 2
    first, second, third = [await run.checkpoint() for _ in range(3)]
    assert names(run.directory.checkpoints) == [second, third]
    await run.resume(second)
    assert names(run.directory.checkpoints) == [second, third], "nothing is removed before there is something new"
    fourth = await run.checkpoint()
    assert standing_checkpoints(tmp_path) == [first, second, fourth]
    assert names(run.directory.checkpoints) == [second, fourth]
