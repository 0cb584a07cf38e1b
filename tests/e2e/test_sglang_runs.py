"""Whole runs whose rollout is SGLang, in an environment of its own. Run by ``make test-engines``."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from support.small_job import Run
from support.whole_runs import alive, descendants, events, follow, pid_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

Start = Callable[..., Any]
ROOT = Path(__file__).parents[2]
PYTHON = ROOT / "build" / "sglang" / "bin" / "python"
ELSEWHERE = ("rollout.use=sglang", f"rollout.python={PYTHON}")
SGLANG = (*ELSEWHERE, "rollout.kv_tokens=8192")
SECONDS = 800.0


def checks(run: Any) -> list[float]:
    return [event["mean_abs_logprob_diff"] for event in events(run, "self_check")]


def metrics(run: Any, name: str) -> list[float]:
    lines = (run.directory / "metrics.jsonl").read_text().splitlines()
    return [record[name] for record in map(json.loads, lines) if record.get(name) is not None]


def test_the_demo_job_learns_on_sglang_as_it_is(tmp_path: Path) -> None:
    """Nothing of it is changed but where it generates, how long it trains, and how closely that is looked at."""
    job = ROOT / "examples" / "sort_symbols" / "job.toml"
    looks = (
        "phase.reinforce.steps=20",
        "phase.warm-up.until.every=15",
        "evaluation.prompts=512",
        "evaluation.every=20",
    )
    sets = [word for override in (*ELSEWHERE, *looks) for word in ("--set", override)]
    run = Run(tmp_path / "run", str(job), "--run-dir", str(tmp_path / "run"), *sets)
    try:
        assert run.wait(seconds=SECONDS) == 0, run.stderr
    finally:
        run.process.kill()
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert max(checks(run)) < 1e-3
    trained = [event["version"] for event in events(run, "batch_trained")][-20:]
    accuracy = {event["version"]: event["sampled_accuracy"] for event in events(run, "evaluation_finished")}
    before, after = accuracy[min(trained)], accuracy[max(trained) + 1]
    print(f"\nheld-out accuracy {before:.3f} -> {after:.3f}, mean |d log p| at most {max(checks(run)):.2g}")
    assert after - before >= 0.05, accuracy
    versions = {(event["instance"], event["version"]) for event in events(run, "instance_version")}
    assert {instance for instance, _ in versions} == {"rollout-0", "rollout-1"}


def test_without_staleness_what_was_sampled_is_what_the_trainer_computes(start: Start) -> None:
    run = start(*SGLANG, "rollout.instances=1", "staleness.policy=synchronous", "staleness.max_staleness=0")
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    assert audit_run(run.directory).ok
    found = metrics(run, "mismatch/abs_logprob_diff_mean")
    assert len(found) == 5
    assert max(found) < 1e-5


def test_answers_go_on_under_newer_versions(start: Start) -> None:
    """The audit's rule of interruptions compares what SGLang reports for each token with what its instance says."""
    run = start(
        *SGLANG,
        "staleness.policy=partial_rollout",
        "rollout.instances=1",
        "rollout.max_new_tokens=200",
        "model.scratch.max_length=256",
        "phase.rl.steps=8",
    )
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert result.summary["mixed"] > 0


def test_a_server_that_is_killed_costs_its_instance_alone(start: Start) -> None:
    run = start(*SGLANG, "phase.rl.steps=20")
    follow(run, "batch_trained", of='"version":5')
    (server, *_), others = descendants(pid_of(run, "rollout-0")), descendants(pid_of(run, "rollout-1"))
    below = [server, *descendants(server)]
    os.kill(server, signal.SIGKILL)
    assert run.wait(seconds=SECONDS) == 0, run.stderr
    assert audit_run(run.directory).ok
    started = [event["node"] for event in events(run, "node_started")]
    assert (started.count("rollout-0"), started.count("rollout-1")) == (2, 1)
    assert alive([*below, *others]) == []


def test_nothing_of_sglang_outlives_a_run_that_is_killed(start: Start) -> None:
    run = start(*SGLANG, "rollout.instances=1")
    follow(run, "batch_trained", of='"version":4')
    below = descendants(run.process.pid)
    run.process.kill()
    run.process.communicate()
    while alive(below):  # the kernel kills them; the test's own time limit is the deadline
        os.sched_yield()
