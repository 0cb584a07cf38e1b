"""What the console counts, and how it puts that."""

from __future__ import annotations

from typing import Any

import pytest

from headrace_observers.display import ASCII_BLOCKS, clock
from headrace_observers.progress import Progress, sparkline


def test_staleness_is_of_the_newest_batch(simulation: Any) -> None:
    progress = Progress({})
    ticket = {e["group"]: e["version"] for e in simulation.events if e["kind"] == "group_dispatched"}
    for event in simulation.events:
        progress.event(event)
        if event["kind"] == "batch_taken":
            assert progress.staleness == [event["version"] - ticket[group] for group in event["groups"]]


def test_idle_share_is_waiting_over_waiting_and_training_of_the_latest_batches() -> None:
    progress = Progress({})
    assert progress.idle_share is None
    for wait in [*[100.0] * 5, *[1.0] * 20]:
        progress.event({"kind": "batch_trained", "wait_seconds": wait, "started": 0.0, "finished": 3.0})
    assert progress.idle_share == 0.25


def test_a_metric_that_is_not_finite_counts_as_absent() -> None:
    progress = Progress({})
    progress.metrics({"reward/mean": float("nan"), "train/loss": float("inf")})
    assert (progress.number("reward/mean"), progress.number("train/loss"), progress.rewards) == (None, None, [])


def test_a_sparkline_spans_from_the_least_to_the_greatest_mean() -> None:
    assert sparkline([0, 1, 2, 3], 4, blocks="abcd") == "abcd"
    assert sparkline([0, 0, 3, 3], 2, blocks="abcd") == "ad"
    assert sparkline([5, 5], 8, blocks="abcd") == "aa"
    assert sparkline([], 8, blocks=ASCII_BLOCKS) == ""


@pytest.mark.parametrize(("seconds", "text"), [(0, "0:00"), (65.9, "1:05"), (3725, "1:02:05")])
def test_the_clock_reads_as_a_clock(seconds: float, text: str) -> None:
    assert clock(seconds) == text
