"""Saves of a checkpoint, by processes that are killed in the middle: ``python -m support.killed_saves FOLDER 5 6``.

The second save is one event after the first, whatever its version: ``5 5`` is after a batch that was skipped."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np

from headrace.contract import Batch, Ragged
from headrace.flow import FlowState, StoredGroup
from headrace.run.checkpoint import RunState, complete, newest, prune, staging
from headrace.run.directory import RunDirectory
from headrace.run.tasks import TasksIdentity


def save(checkpoints: Path, version: int, *, events: int = 17) -> Path:
    """All of a save: trainer, loader (the flow's position), buffered rows, and the clean-up."""
    path = RunDirectory(checkpoints.parent).checkpoint(version, event=events)
    hidden = staging(path)
    (hidden / "trainer").mkdir()
    (hidden / "trainer" / "weights").write_text(f"weights of {version}")
    group = StoredGroup(group=version, version=version, oldest=version, tokens=(version,))
    flow = FlowState(
        version=version, next_group=version + 1, stored=(group,), unfinished=(), trained=version, dropped={}
    )
    tokens = Ragged.from_arrays([np.full(version, version, dtype=np.int32)])
    rows = Batch(rows=np.array([version]), columns={"tokens": tokens})
    complete(hidden, path, state(flow, events), [rows])
    with open(checkpoints.parent / "announced", "a") as log:  # as the event log does
        log.write(f"{path.name}\n")
    prune(checkpoints, in_force=announced(checkpoints), keep=1)
    return path


def announced(checkpoints: Path) -> list[str]:
    return (checkpoints.parent / "announced").read_text().split()


def state(flow: FlowState, events: int) -> RunState:
    return RunState(
        directory="",
        events=events,
        tasks=TasksIdentity(sizes={"train": None, "evaluation": None}, digest=""),
        phase=0,
        step=flow.version,
        model_path="",
        digest="",
        flow=flow,
        skipped_in_a_row=0,
        quarantine=[],
        prompts=0,
        samples=0,
        optimizer_steps=0,
        evaluations={},
        samples_before={},
        rolled_out=True,
    )


def resumable(checkpoints: Path) -> tuple[int, int]:
    """The version that everything in the newest checkpoint agrees on, and the events before it."""
    found = newest(checkpoints, in_force=announced(checkpoints))
    (rows,) = found.rows()
    (row,) = rows.rows.tolist()
    weights = (found.trainer / "weights").read_text()
    version = found.state.version
    assert (row, found.state.step, found.state.flow.next_group, weights) == (
        version,
        version,
        version + 1,
        f"weights of {version}",
    )
    assert rows.ragged("tokens")[0].tolist() == [version] * version
    return version, found.state.events


def killed_at_many_instants(root: Path, *, first: int, second: int) -> list[tuple[int, int]]:
    """For every other call to the system that a save of ``second`` makes, one process that is killed with that call;
    the states that were resumable after it. For a process of its own: it forks."""
    os.fsync = lambda descriptor: None  # the system goes on; and a disk is slow
    states = []
    for instant in range(0, 1000, 2):
        checkpoints = root / str(instant) / "checkpoints"
        checkpoints.mkdir(parents=True)
        save(checkpoints, first)
        if (child := os.fork()) == 0:
            left = instant

            def count(event: str, arguments: Any) -> None:
                nonlocal left
                if event == "open" or event.startswith(("os.", "shutil.")):
                    left -= 1
                if left < 0:
                    os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(count)
            save(checkpoints, second, events=18)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status == 0:
            return states
        states.append(resumable(checkpoints))
        shutil.rmtree(checkpoints.parent)
    raise AssertionError("the save never ends")


if __name__ == "__main__":
    where, before, after = sys.argv[1:]
    print(json.dumps(killed_at_many_instants(Path(where), first=int(before), second=int(after))))
