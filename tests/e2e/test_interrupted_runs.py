"""Jobs whose trajectories are interrupted: real processes, real engines, answers with a long tail."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from typing import Any

from headrace.observe.audit import AuditResult, audit_run
from support.whole_runs import events, follow, pid_of

Start = Callable[..., Any]
INTERRUPTED = (
    "staleness.policy=partial_rollout",
    "rollout.slots=8",
    "rollout.max_new_tokens=400",
    "model.scratch.max_length=512",
)
"""A third of the answers have more than ten times as many tokens as the shortest third."""


def audited(run: Any) -> AuditResult:
    result = audit_run(run.directory)
    assert result.ok, result.violations
    return result


def mixed(run: Any) -> list[int]:
    """Trained rows with tokens of several versions."""
    several = {e["trajectory"] for e in events(run, "trajectory_finished") if len(e["spans"]) > 1}
    return [row for event in events(run, "batch_trained") for row in event["rows"] if row in several]


def metrics(run: Any, name: str) -> list[float]:
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if name in record]


def test_answers_go_on_under_newer_versions_and_the_run_says_that_it_gives_c1_up(start: Start) -> None:
    run = start(*INTERRUPTED, "phase.rl.steps=8")
    assert run.wait() == 0, run.stderr
    result = audited(run)
    assert len(mixed(run)) == result.summary["mixed"] > 0
    assert result.summary["interrupted"] >= len(mixed(run))
    assert result.summary["prefilled_again"] > 0
    assert set(result.summary["staleness"]["rl"]) <= {0, 1, 2}
    assert result.verdict.startswith("PASS without C1")
    assert "partial_rollout interrupts trajectories" in run.stdout
    assert "PASS without C1" in run.stdout
    assert "not of a single policy" in (run.directory / "report.html").read_text()
    assert sum(metrics(run, "rollout/mixed")) >= len(mixed(run))
    assert max(metrics(run, "staleness/mixed_share")) > 0 == max(metrics(run, "staleness/masked_share"))
    asked, answered = events(run, "evaluation_started"), events(run, "evaluation_finished")
    assert len(asked) == len(answered) > 1


def test_with_one_version_at_a_time_keys_kept_older_tokens_masked_and_stages_apart(start: Start) -> None:
    run = start(
        *INTERRUPTED,
        "phase.rl.steps=8",
        "rollout.live_versions=1",
        "staleness.keep_kv=true",
        "staleness.mask_older=true",
        "stages.processes=true",
    )
    assert run.wait() == 0, run.stderr
    result = audited(run)
    assert result.summary["mixed"] > 0
    assert result.summary["prefilled_again"] == 0
    shares = zip(metrics(run, "staleness/mixed_share"), metrics(run, "staleness/masked_share"), strict=True)
    assert all((several > 0) == (masked > 0) for several, masked in shares)


def test_a_run_whose_instance_is_killed_in_the_middle_of_interrupted_answers_completes(start: Start) -> None:
    run = start(*INTERRUPTED, "phase.rl.steps=10")
    switched = follow(run, "instance_switched")
    os.kill(pid_of(run, switched["instance"]), signal.SIGKILL)
    assert run.wait() == 0, run.stderr
    result = audited(run)
    assert result.summary["lost_nodes"] == {switched["instance"]: 1}
    assert result.summary["mixed"] > 0


def test_an_interrupted_run_goes_on_from_its_checkpoint(start: Start, resume: Callable[[Any], Any]) -> None:
    first = start(*INTERRUPTED, "phase.rl.steps=12", "checkpoint.every=2")
    follow(first, "checkpoint_saved", after='"kind":"instance_switched"')
    first.process.kill()
    first.wait()
    again = resume(first)
    assert again.wait() == 0, again.stderr
    result = audited(again)
    assert (result.summary["resumed"], result.summary["status"]) == (1, "completed")
    assert result.summary["mixed"] > 0
