"""Case I02: failures of single trajectories are contained and counted, until there are too many of them."""

from __future__ import annotations

import pytest

from headrace.errors import RunError
from headrace.services.failures import FailureShare, gist


def test_I02_one_failing_reward_is_counted_by_type_and_the_run_goes_on() -> None:
    failures = FailureShare(window=8, limit=0.5)
    failures.record(trajectories=8, failed={"ValueError": 1}, detail="Traceback: ValueError: bad answer")
    assert failures.reasons == {"ValueError": 1}


def test_I02_a_reward_that_always_fails_stops_the_run_with_the_first_traceback() -> None:
    failures = FailureShare(window=8, limit=0.5)
    failures.record(trajectories=4, failed={"ValueError": 4}, detail="Traceback: first")
    with pytest.raises(RunError, match=r"8 of the last 8 trajectories failed") as stopped:
        failures.record(trajectories=4, failed={"ValueError": 4}, detail="Traceback: second")
    assert "Traceback: first" in stopped.value.origin
    assert "max_failed_share" in stopped.value.fix


def test_I02_the_limit_is_a_share_of_the_newest_trajectories() -> None:
    failures = FailureShare(window=8, limit=0.5)
    failures.record(trajectories=4, failed={"TimeoutError": 4})
    failures.record(trajectories=4, failed={})
    failures.record(trajectories=4, failed={})
    failures.record(trajectories=4, failed={"TimeoutError": 4})
    assert failures.reasons == {"TimeoutError": 8}


def test_I02_a_run_stops_as_soon_as_the_rest_of_a_batch_cannot_keep_it_within_the_limit_and_no_sooner() -> None:
    failures = FailureShare(window=16, limit=0.5)
    failures.record(trajectories=8, failed={"ValueError": 8})
    with pytest.raises(RunError, match=r"9 of the last 9 trajectories failed"):
        failures.record(trajectories=1, failed={"ValueError": 1})


@pytest.mark.parametrize(
    ("detail", "said"),
    [
        (
            "Traceback (most recent call last):\n  File ...\n    1 / 0\nZeroDivisionError: by zero\n",
            "ZeroDivisionError: by zero",
        ),
        (
            "headrace.errors.ContractError: reward 'r' returned None\n  fix:  return a number",
            "reward 'r' returned None",
        ),
        ("no score within 10 s", "no score within 10 s"),
        ("", ""),
    ],
)
def test_I02_the_gist_of_a_failure_is_what_went_wrong(detail: str, said: str) -> None:
    assert gist(detail).endswith(said)
