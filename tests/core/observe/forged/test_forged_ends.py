"""Lies about how a run and its phases ended, and ends that are none."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from headrace.observe.lines import RecordLog

METRIC = "evaluation/sampled_accuracy"


def a_failed_run_called_completed(log: Any) -> None:
    log.events[-1]["reason"] = "node trainer was killed by signal 9"


def a_run_that_trained_nothing(log: Any) -> None:
    phase = next(i for i, e in enumerate(log.events) if e["kind"] == "phase_started")
    log.events = [*log.events[: phase + 1], log.events[-1]]
    log.renumber()


def a_run_that_lacks_its_last_phase(log: Any) -> None:
    log.events[0]["phases"].append("polish")


def a_phase_that_no_job_asked_for(log: Any) -> None:
    log.events[0]["phases"] = ["reinforce"]


def a_phase_with_more_batches_than_steps(log: Any) -> None:
    log.one("phase_started")["steps"] = 11


def a_phase_that_ended_early(log: Any) -> None:
    log.one("phase_started")["steps"] = 13


def a_phase_that_ended_by_an_accuracy_it_had_not(log: Any) -> None:
    log.one("phase_started").update(steps=13, until=[METRIC, 1.0])


def a_phase_that_ended_by_the_accuracy_of_an_earlier_version(log: Any) -> None:
    log.one("phase_started").update(steps=13, until=[METRIC, 0.0])
    log.events = [e for e in log.events if not (e["kind"].startswith("evaluation") and e["version"] == 15)]
    log.renumber()


LIES: tuple[tuple[str, Callable[[Any], None], str], ...] = (
    ("phases", a_failed_run_called_completed, "completed, and ended because of this: node trainer was killed"),
    ("phases", a_run_that_trained_nothing, "phase 'warm-up' ended after 0 of 3 batches; .* before: nothing"),
    ("phases", a_run_that_trained_nothing, "completed after 1 of 2 phases"),
    ("phases", a_run_that_lacks_its_last_phase, "completed after 2 of 3 phases"),
    ("phases", a_phase_that_no_job_asked_for, "phase 'warm-up' started where 'reinforce' was due"),
    ("phases", a_phase_with_more_batches_than_steps, "ended after 12 of 11 batches"),
    ("phases", a_phase_that_ended_early, "ended after 12 of 13 batches"),
    ("phases", a_phase_that_ended_by_an_accuracy_it_had_not, f"{METRIC} >= 1, which version 15 was not evaluated"),
    ("phases", a_phase_that_ended_by_the_accuracy_of_an_earlier_version, "which version 15 was not evaluated"),
)


@pytest.mark.parametrize(("rule", "lie", "shown"), [pytest.param(*lie, id=lie[1].__name__) for lie in LIES])
def test_a_lie_about_an_end_is_caught(rule: str, lie: Callable[[Any], None], shown: str, log: Any) -> None:
    lie(log)
    log.assert_caught(rule, shown)


def test_a_phase_may_end_early_by_the_accuracy_that_it_names(log: Any, tmp_path: Any) -> None:
    log.one("phase_started").update(steps=200, until=[METRIC, 0.0])
    with RecordLog(tmp_path / "early.jsonl") as lines:
        for event in log.events:
            lines.write(event)
    result = audit_run(tmp_path / "early.jsonl")
    assert result.ok, result.violations
