"""Runs of ``remax``: a greedy answer beside each group."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from typing import Any

from headrace.observe.audit import audit_run
from headrace.observe.epochs import standing_events
from headrace.observe.events import VersionPublished
from support.whole_runs import PHASE_TWO, events, follow

Start = Callable[..., Any]
REMAX = ('phase.rl.algorithm={use="remax"}', "batch.group_size=2", "phase.rl.steps=8", "batch.mini_batches=1")
LOCKSTEP = "staleness.max_staleness=0"


def digests(run: Any) -> dict[int, str]:
    return {e.version: e.digest for e in standing_events(run.directory) if isinstance(e, VersionPublished)}


def metrics(run: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run.directory / "metrics.jsonl").read_text().splitlines()]


def test_a_group_has_one_answer_more_that_is_scored_and_told_apart(start: Start) -> None:
    run = start(*REMAX, "staleness.max_staleness=2")
    assert run.wait() == 0, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    (began,) = (event for event in events(run, "phase_started") if event["phase"] == "rl")
    assert (began["greedy"], began["group_size"]) == (True, 3)
    rewards = {e["trajectory"]: e["reward"] for e in events(run, "trajectory_scored")}
    versions = {e["trajectory"]: e["spans"][0][0] for e in events(run, "trajectory_finished") if e["spans"]}
    groups = [event["trajectories"] for event in events(run, "group_dispatched") if len(event["trajectories"]) == 3]
    trained = {row for event in events(run, "batch_trained") for row in event["rows"]}
    for batch, record in zip(events(run, "batch_taken")[-8:], metrics(run)[-8:], strict=True):
        greedy = [rewards[row] for row in batch["rows"] if row % 3 == 2]
        sampled = [rewards[row] for row in batch["rows"] if row % 3 < 2]
        assert len(sampled) == 2 * len(greedy) == 16
        assert abs(record["reward/greedy_mean"] - sum(greedy) / 8) < 1e-6
        assert abs(record["reward/mean"] - sum(sampled) / 16) < 1e-6
    for group in groups:
        if group[-1] in trained:
            assert len({versions[trajectory] for trajectory in group}) == 1


def test_a_resumed_run_equals_the_uninterrupted_one_and_separate_stages_change_nothing(
    start: Start, resume: Callable[[Any], Any]
) -> None:
    settings = (*REMAX, LOCKSTEP, "checkpoint.every=3")
    whole, apart, killed = start(*settings), start(*settings, "stages.processes=true"), start(*settings)
    follow(killed, "checkpoint_saved", after=PHASE_TWO)
    killed.process.send_signal(signal.SIGKILL)
    killed.wait()
    resumed = resume(killed)
    assert resumed.wait() == whole.wait() == apart.wait() == 0, resumed.stderr + apart.stderr
    assert digests(resumed) == digests(whole) == digests(apart)
    assert len(set(digests(whole).values())) > 6
    for run in (resumed, whole, apart):
        assert audit_run(run.directory).ok
