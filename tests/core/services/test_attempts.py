"""How often a trajectory is tried."""

from __future__ import annotations

import pytest

from headrace.services.attempts import Attempts


@pytest.mark.parametrize("most", [1, 2, 3])
def test_a_trajectory_is_tried_at_most_max_attempts_times(most: int) -> None:
    attempts = Attempts(most)
    tries = 1
    while attempts.failed(7):
        assert attempts.current(7) == tries
        tries += 1
    assert tries == most


def test_failures_of_one_trajectory_do_not_count_for_another() -> None:
    attempts = Attempts(2)
    attempts.failed(0)
    assert attempts.current(1) == 0
    assert attempts.failed(1)


def test_what_is_not_outstanding_any_more_is_forgotten() -> None:
    attempts = Attempts(2)
    attempts.failed(0)
    attempts.forget([0, 5])
    assert attempts.current(0) == 0
