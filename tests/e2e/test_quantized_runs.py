"""Runs whose weights are low-bit where answers are generated."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from support.whole_runs import PHASE_TWO, events, follow

Start = Callable[..., Any]
SHORT = ("phase.warm-up.steps=6", "phase.rl.steps=2", "batch.mini_batches=1", "staleness.max_staleness=0")
APART = "stages.processes=true"
KL = 'algorithm={use="grpo",kl_coefficient=0.05}'
MISMATCH = "mismatch/abs_logprob_diff_mean"


def mismatches(run: Any) -> list[float]:
    """Of each batch that was sampled."""
    records = map(json.loads, (run.directory / "metrics.jsonl").read_text().splitlines())
    return [record[MISMATCH] for record in records if MISMATCH in record]


def completed(run: Any) -> Any:
    assert run.wait() == 0, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    return run


@pytest.mark.parametrize("scheme", ["w8a8_int8", "w4a16_int4"])
def test_QRL_4_an_aligned_trainer_has_the_log_probs_of_its_rollout_and_another_has_not(
    start: Start, scheme: str
) -> None:
    low_bit = f"quantization.scheme={scheme}"
    aligned = mismatches(completed(start(*SHORT, low_bit)))
    plain = mismatches(completed(start(*SHORT, low_bit, "quantization.align=false")))
    assert len(aligned) == len(plain) == 2
    assert max(aligned) * 20 < min(plain)


def test_an_interrupted_run_goes_on_with_its_reference_low_bit_too(start: Start, resume: Callable[[Any], Any]) -> None:
    """The audit compares what instances say that they have with what the trainer published."""
    run = start("quantization.scheme=w8a8_int8", "checkpoint.every=2", "phase.warm-up.steps=2", APART, KL)
    follow(run, "checkpoint_saved", after=PHASE_TWO)
    run.interrupt()
    run.wait()
    completed(resume(run))
    assert events(run, "resumed")
    assert {event["stage"] for event in events(run, "stage_finished")} == {"advantage", "reference"}
