"""Whole runs whose trainer is Megatron-Core, in an environment of its own. Run by ``make test-engines``."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from support.small_job import Run
from support.whole_runs import alive, descendants, events, follow, pid_of

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "examples" / "sort_symbols" / "job.toml"
PYTHON = ROOT / "build" / "megatron" / "bin" / "python"
STEPS = (
    "phase.warm-up.trainer.optimizer=adamw",  # which Megatron has, in place of muon
    "phase.warm-up.trainer.learning_rate=2e-3",
    "phase.reinforce.steps=20",
    "evaluation.prompts=512",
)


@pytest.fixture
def demo(tmp_path: Path) -> Iterator[Any]:
    """Start the demo job with overrides."""
    runs: list[Run] = []

    def start(*overrides: str) -> Run:
        sets = [word for override in overrides for word in ("--set", override)]
        runs.append(Run(tmp_path / "run", str(DEMO), "--run-dir", str(tmp_path / "run"), *sets))
        return runs[-1]

    yield start
    for run in runs:
        run.process.kill()
        run.process.communicate()


@pytest.mark.parametrize("layout", ["data_parallel", "tensor_parallel"])
def test_the_demo_job_learns_with_two_ranks_of_megatron(demo: Any, layout: str) -> None:
    run = demo(*STEPS, "trainer.use=megatron", f"trainer.python={PYTHON}", f"trainer.{layout}=2")
    follow(run, "phase_started", of='"phase":"reinforce"')
    ranks = descendants(pid_of(run, "trainer"))
    assert run.wait(seconds=800) == 0, run.stderr
    assert audit_run(run.directory).ok
    assert len(ranks) == 1
    assert alive(ranks) == []
    before, after = accuracies(run)
    gaps = [event["mean_abs_logprob_diff"] for event in events(run, "self_check")]
    print(f"{layout}: accuracy {before:.3f} -> {after:.3f}, mean |dlogp| at the start at most {max(gaps):.2g}")
    assert after - before >= 0.05
    assert max(gaps) < 1e-3


@pytest.mark.parametrize("layout", ["data_parallel", "tensor_parallel"])
def test_without_staleness_what_was_sampled_is_what_two_ranks_compute(start: Any, layout: str) -> None:
    run = start(
        "trainer.use=megatron",
        f"trainer.python={PYTHON}",
        f"trainer.{layout}=2",
        "staleness.policy=synchronous",
        "staleness.max_staleness=0",
        "phase.rl.steps=20",
    )
    assert run.wait(seconds=400) == 0, run.stderr
    assert audit_run(run.directory).ok
    lines = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    found = [line["mismatch/abs_logprob_diff_mean"] for line in lines if line["phase"] == "rl"]
    print(f"{layout}: mean |dlogp| of {len(found)} batches at most {max(found):.2g}")
    assert len(found) == 20
    assert max(found) < 1e-5


def accuracies(run: Run) -> tuple[float, float]:
    """Held-out sampled accuracy before the last 20 versions, and after them."""
    evaluations = events(run, "evaluation_finished")
    assert {event["prompts"] for event in evaluations} == {512}
    found = {event["version"]: event["sampled_accuracy"] for event in evaluations}
    last = max(found)
    return found[max(version for version in found if version <= last - 20)], found[last]
