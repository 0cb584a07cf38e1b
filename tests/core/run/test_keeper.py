"""What a checkpoint takes from a run and gives back, and what becomes of it when storage is lost meanwhile."""

from __future__ import annotations

import logging
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
from headrace.run import keeper as module
from headrace.run.checkpoint import Checkpoint
from headrace.run.keeper import Keeper


class State(msgspec.Struct):
    """As much of a run's state as is looked at."""

    flow: FlowState
    version: int = 3
    phase: int = 0
    events: int = 17


def stored(*groups: int) -> FlowState:
    kept = tuple(StoredGroup(group=g, version=3, oldest=3, tokens=(1, 1), nbytes=(1, 1)) for g in groups)
    return FlowState(version=3, next_group=9, stored=kept, unfinished=(), trained=0, dropped={})


def batch(rows: list[int]) -> Batch:
    return Batch(rows=np.array(rows, dtype=np.int64), columns={"reward": np.zeros(len(rows), dtype=np.float32)})


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def _save(path: Path) -> None:
    path.mkdir()
    (path / "weights").write_bytes(b"weights")


class Run:
    """The parts of a run that a keeper touches, and what it did to them, in order."""

    def __init__(self, directory: Path, *, lost: bool = False) -> None:
        self.did: list[Any] = []
        self.lost = lost
        self.measured: dict[str, int] = {}
        self.attempts = SimpleNamespace(quarantine={8})
        self.evaluator = SimpleNamespace(results={})
        phase = SimpleNamespace(batch=SimpleNamespace(group_size=2))
        parts: Any = SimpleNamespace(
            job=SimpleNamespace(phases=[phase], checkpoint=SimpleNamespace(keep=1)),
            directory=SimpleNamespace(
                checkpoints=directory, checkpoint=lambda version: directory / f"version-{version:08d}"
            ),
            storage=self,
            trainer=self,
            save=self.save,
            journal=SimpleNamespace(emit=lambda kind, **fields: self.did.append(kind)),
            measures=SimpleNamespace(restore=lambda **counted: self.measured.update(counted)),
            evaluator=self.evaluator,
            controller=SimpleNamespace(attempts=self.attempts),
        )
        self.keeper = Keeper(parts)

    async def get(self, rows: list[int], columns: list[str]) -> Batch:
        if self.lost:
            raise LostRowsError("a storage unit has not all of the rows it was asked for: row 4")
        self.did.append(("get", rows))
        return batch(rows)

    async def put(self, rows: Batch) -> None:
        self.did.append(("put", rows.rows.tolist()))

    async def save(self, path: Path, *, kind: str) -> None:
        self.did.append(("save", kind))
        _save(path)

    async def call(self, method: str, request: Any, **_: Any) -> None:
        self.did.append((method, request.path))


async def test_every_stored_row_is_kept_and_the_log_names_the_checkpoint_once_it_is_there(tmp_path: Path) -> None:
    run = Run(tmp_path)
    await run.keeper.write(State(stored(2, 4)))  # type: ignore[arg-type]  # as much as is looked at
    assert run.did == [("get", [4, 5, 8, 9]), ("save", "resume"), "checkpoint_saved"]
    assert names(tmp_path) == ["version-00000003"]
    assert names(tmp_path / "version-00000003") == ["manifest.json", "rows-0.bin", "state.json", "trainer"]


async def test_many_rows_are_kept_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS_AT_ONCE", 3)
    run = Run(tmp_path)
    await run.keeper.write(State(stored(2, 4)))  # type: ignore[arg-type]  # as much as is looked at
    assert run.did[:2] == [("get", [4, 5, 8]), ("get", [9])]


async def test_rows_that_storage_loses_meanwhile_cost_the_checkpoint_and_not_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = Run(tmp_path, lost=True)
    with caplog.at_level(logging.WARNING):
        await run.keeper.write(State(stored(2)))  # type: ignore[arg-type]  # as much as is looked at
    assert "no checkpoint of version 3: a storage unit has not all of the rows" in caplog.text
    assert run.did == []
    assert names(tmp_path) == []


async def test_weights_rows_and_counters_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path)
    state: Any = SimpleNamespace(
        prompts=4,
        samples=8,
        optimizer_steps=2,
        evaluations={0: {"evaluation/greedy_accuracy": 0.5}},
        quarantine=[3],
    )
    monkeypatch.setattr(Checkpoint, "rows", lambda self: iter([batch([4, 5]), batch([8, 9])]))
    await run.keeper.restore(Checkpoint(tmp_path, state))
    assert run.did == [("restore", str(tmp_path / "trainer")), ("put", [4, 5]), ("put", [8, 9])]
    assert run.measured == {"prompts": 4, "samples": 8, "optimizer_steps": 2}
    assert run.evaluator.results == state.evaluations
    assert run.attempts.quarantine == {3, 8}
