"""Reference log-probs and advantages in processes of their own: the same is trained, and a lost stage costs nothing."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from headrace.observe.epochs import standing_events
from headrace.observe.events import BatchTrained, Resumed, StageFinished, VersionPublished
from support.whole_runs import PHASE_TWO, events, follow, pid_of

Start = Callable[..., Any]
APART = "stages.processes=true"
KL = 'algorithm={use="grpo",kl_coefficient=0.05}'


def trained(run: Any) -> list[tuple[Any, ...]]:
    """Rows of each batch with the rewards that the trainer read, and the weights that each version has."""
    batches: list[tuple[Any, ...]] = []
    for event in standing_events(run.directory):
        if isinstance(event, BatchTrained):
            batches.append((event.version, event.rows, event.rewards))
        elif isinstance(event, VersionPublished):
            batches.append((event.version, event.digest))
    return batches


def staged(run: Any) -> Counter[tuple[str, int]]:
    """(stage, row) → how often it went through, since the last resume."""
    found: Counter[tuple[str, int]] = Counter()
    for event in standing_events(run.directory):
        if isinstance(event, Resumed):
            found.clear()
        elif isinstance(event, StageFinished):
            found.update((event.stage, row) for row in event.rows)
    return found


def completed(run: Any) -> Any:
    assert run.wait() == 0, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    return run


def test_a_synchronous_run_is_the_same_to_the_bit_wherever_its_stages_are(start: Start) -> None:
    together, apart = (start("staleness.max_staleness=0", KL, *more) for more in ((), (APART, "storage.units=2")))
    assert trained(completed(apart)) == trained(completed(together))
    assert not events(together, "stage_finished")
    assert {stage for stage, _ in staged(apart)} == {"advantage", "reference"}
    assert set(staged(apart).values()) == {1}
    whole, parts = (
        [line.count('"reward/mean"') for line in (run.directory / "metrics.jsonl").read_text().splitlines()]
        for run in (together, apart)
    )
    assert parts == whole, "what an algorithm says of a batch is recorded wherever it says so"


def test_a_reference_is_worked_out_while_others_of_the_group_are_generated(start: Start) -> None:
    run = completed(start(APART, KL))
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for event in events(run, "row_stored", "stage_finished"):
        if event["kind"] == "row_stored":
            last[event["group"]] = event["seq"]
        elif event["stage"] == "reference":
            for row in event["rows"]:
                first.setdefault(row // 4, event["seq"])
    assert any(first[group] < last[group] for group in first)


@pytest.mark.parametrize("stage", ["reference", "advantage"])
def test_a_stage_that_is_killed_is_started_again_and_each_row_goes_through_it_once(start: Start, stage: str) -> None:
    run = start("phase.rl.steps=12", APART, KL, "batch.streaming=true", "phase.warm-up.batch.streaming=false")
    follow(run, "stage_finished", after=PHASE_TWO)
    os.kill(pid_of(run, stage), signal.SIGKILL)
    completed(run)
    assert [e["node"] for e in events(run, "node_stopped") if e["reason"] != "ended"] == [stage]
    assert set(staged(run).values()) == {1}
    assert stage in (run.directory / "report.html").read_text()


def test_a_stage_that_hangs_is_taken_for_lost(start: Start) -> None:
    run = start("phase.rl.steps=100000", APART, KL)
    follow(run, "stage_finished", after=PHASE_TWO)
    os.kill(pid_of(run, "reference"), signal.SIGSTOP)
    assert follow(run, "node_stopped")["node"] == "reference"
    follow(run, "batch_trained", after='"kind":"node_stopped"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    assert audit_run(run.directory).ok


def test_of_a_resumed_run_what_was_stored_goes_through_its_stages_again(
    start: Start, resume: Callable[[Any], Any]
) -> None:
    run = start("phase.rl.steps=12", APART, KL, "checkpoint.every=2", "storage.units=2")
    follow(run, "checkpoint_saved", after=PHASE_TWO)
    os.kill(pid_of(run, "trainer"), signal.SIGKILL)
    assert run.wait() == 1
    resumed = completed(resume(run))
    assert set(staged(resumed).values()) == {1}
