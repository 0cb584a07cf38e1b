"""A run that was stopped, or died, goes on from its newest checkpoint as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from headrace.observe.epochs import standing_events
from headrace.observe.events import BatchTrained, VersionPublished
from support.small_job import small_job
from support.whole_runs import PHASE_TWO, events, follow, pid_of

Start = Callable[..., Any]

TIMES = {
    *("time", "epoch", "train/seconds", "trainer/wait_seconds", "trainer/idle_share", "flow/live_versions"),
    "nodes/max_loop_lag_seconds",
    *(f"update/{part}_seconds" for part in ("transfer", "pause", "resume", "stopped")),
    "update/transfer_bytes",
}
"""Metrics that depend on the clock; how long an old version lives depends on its evaluation's, and in which
batch's time a version is fetched on when the others are trained."""


def digests(run: Any) -> dict[int, str]:
    return {e.version: e.digest for e in standing_events(run.directory) if isinstance(e, VersionPublished)}


def rows(run: Any) -> list[list[int]]:
    return [e.rows for e in standing_events(run.directory) if isinstance(e, BatchTrained)]


def metrics(run: Any) -> dict[tuple[str, int], dict[str, float]]:
    """The later record of a step stands."""
    records = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    return {
        (r["phase"], r["step"]): {k: v for k, v in r.items() if k not in TIMES and not k.endswith("per_second")}
        for r in records
    }


EARLY = """
import os, signal
from pathlib import Path
from headrace.hooks import Observer, hookimpl

class Early(Observer):
    \"""Ctrl-C before the first event.\"""

    @hookimpl
    def run_opened(self, run_dir):
        if (Path(__file__).parent / "interrupt").exists():
            os.kill(os.getpid(), signal.SIGINT)
"""


@dataclass
class Life:
    """A run that met with everything; every part of it asserts its own rule below."""

    run: Any
    trainer_killed: Any
    interrupted: Any
    resumed_too_early: Any
    interrupted_at_once: Any
    older: str = ""
    """Checkpoint before the newest, which was damaged."""


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    """It is resumed while it runs; its trainer is killed; it is resumed, and interrupted before its first event; it is
    resumed, and interrupted; its newest checkpoint is damaged; it is resumed to its end."""
    folder = tmp_path_factory.mktemp("life")
    (folder / "early.py").write_text(EARLY)
    with small_job(folder) as job:
        first = job.start(
            "phase.rl.steps=16", "checkpoint.every=2", 'observers=[{ use = "console" }, { use = "./early.py:Early" }]'
        )
        follow(first, "run_started")
        early = job.resume(first)
        early.wait()
        follow(first, "checkpoint_saved", after=PHASE_TWO)
        os.kill(pid_of(first, "trainer"), signal.SIGKILL)
        first.wait()
        (folder / "interrupt").touch()
        at_once = job.resume(first)
        at_once.wait()
        (folder / "interrupt").unlink()
        second = job.resume(first)
        follow(second, "checkpoint_saved", after='"kind":"resumed"')
        second.interrupt()
        second.wait()
        older, newest = sorted((second.directory / "checkpoints").glob("version-*"))
        _damage(next((newest / "trainer").glob("weights*")))
        third = job.resume(second)
        third.wait()
        yield Life(third, first, second, early, at_once, str(older))


def _damage(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def test_a_killed_trainer_ends_the_run_with_the_command_that_continues_it(life: Life) -> None:
    assert life.trainer_killed.process.returncode == 1
    assert "node trainer" in life.trainer_killed.stderr
    assert f"headrace run --resume {life.run.directory}" in life.trainer_killed.stderr


def test_an_interrupted_run_finishes_its_batch_and_writes_a_checkpoint(life: Life) -> None:
    assert life.interrupted.process.returncode == 130
    assert "stopping after this batch" in life.interrupted.stdout


def test_two_processes_cannot_work_on_one_run(life: Life) -> None:
    assert life.resumed_too_early.process.returncode == 1
    assert "still going on" in life.resumed_too_early.stderr


def test_an_older_checkpoint_is_taken_when_the_newest_is_damaged(life: Life) -> None:
    assert events(life.run, "resumed")[-1]["checkpoint"] == life.older


def test_an_interrupt_before_the_first_event_leaves_a_log_with_a_beginning_and_an_end(life: Life) -> None:
    """However early it comes, the run can be resumed and proven."""
    assert life.interrupted_at_once.process.returncode == 130
    assert "audit         PASS" in life.interrupted_at_once.stdout
    assert "Traceback" not in life.interrupted_at_once.stderr


def test_a_run_resumed_again_and_again_keeps_every_invariant(life: Life) -> None:
    assert life.run.process.returncode == 0, life.run.stderr
    assert len(events(life.run, "resumed")) == 3
    assert len(rows(life.run)) == 4 + 16
    assert audit_run(life.run.directory).ok


def test_a_complete_run_is_not_resumed(life: Life) -> None:
    with small_job(life.run.directory.parent) as job:
        again = job.resume(life.run)
        assert again.wait() == 1
    assert "complete" in again.stderr
    assert "Traceback" not in again.stderr


def test_a_resumed_synchronous_run_equals_the_uninterrupted_one(start: Start, resume: Start) -> None:
    settings = ("phase.rl.steps=9", "checkpoint.every=3", "staleness.max_staleness=0")
    whole, killed = start(*settings), start(*settings)
    follow(killed, "checkpoint_saved", after=PHASE_TWO)
    killed.process.send_signal(signal.SIGKILL)
    killed.wait()
    resumed = resume(killed)
    assert resumed.wait() == whole.wait() == 0, resumed.stderr
    assert digests(resumed) == digests(whole)
    assert len(set(digests(whole).values())) == len(digests(whole)), "every batch must change the weights"
    assert rows(resumed) == rows(whole)
    assert metrics(resumed) == metrics(whole)
    assert audit_run(resumed.directory).ok


def test_a_storage_unit_that_is_killed_early_in_a_resume_is_started_again(start: Start, resume: Start) -> None:
    """As it starts, while others do, and once more before or while it takes rows back."""
    killed = start("phase.rl.steps=9", "checkpoint.every=3")
    follow(killed, "checkpoint_saved", after=PHASE_TWO)
    killed.process.send_signal(signal.SIGKILL)
    killed.wait()
    resumed = resume(killed)
    for kind, of in (("node_started", "storage-0"), ("node_started", "rollout-0"), ("version_published", "")):
        follow(resumed, kind, of=of, after='"kind":"resumed"')
        os.kill(pid_of(resumed, "storage-0"), signal.SIGKILL)
    assert resumed.wait() == 0, resumed.stderr
    stopped = [e["node"] for e in events(resumed, "node_stopped") if e["reason"] == "was killed by signal 9"]
    assert stopped == ["storage-0"] * 3
    assert audit_run(resumed.directory).ok
