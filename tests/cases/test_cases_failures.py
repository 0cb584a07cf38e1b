"""Case I02: failures of single trajectories are contained and counted, until there are too many of them."""

from __future__ import annotations

import pytest

from headrace.errors import RunError
from headrace.services.controller import Controller
from headrace.services.failures import DETAIL_CHARACTERS, LINE_CHARACTERS, FailureShare, excerpt, gist
from headrace.services.messages import Member, Report, Scored, WorkItem
from support.desk import Desk


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


def test_I02_the_message_says_of_how_many_the_limit_is_a_share() -> None:
    failures = FailureShare(window=64, limit=0.25, of="this evaluation")
    with pytest.raises(
        RunError, match=r"17 of the last 20 .* more than 25% of the 64 that this evaluation has: 17 Val"
    ):
        failures.record(trajectories=20, failed={"ValueError": 17})


async def test_I02_before_the_first_batch_the_limit_is_a_share_of_the_evaluation_s_answers() -> None:
    desk = Desk()
    controller = Controller(emit=desk.emit, fleet=desk.fleet, ledger=desk.ledger, max_failed_share=0.5)
    members = [Member(trajectory=number, task=number, instance="", seed=0) for number in range(16)]
    item = WorkItem(
        kind="evaluation",
        group=1,
        version=0,
        columns=(),
        split="evaluation",
        members=members,
        max_new_tokens=4,
        temperature=1.0,
    )
    controller.evaluate([item], lambda done: None)
    cold = Scored(trajectories=1, unscored={"RuntimeError": 1}, detail="RuntimeError: a cold start")
    await controller.report(Report(worker="environment-0.0", entries=[cold] * 8))
    assert not controller.failed.done(), "half of the answers may fail"
    await controller.report(Report(worker="environment-0.0", entries=[cold]))
    with pytest.raises(RunError, match=r"9 of the last 9 .* 50% of the 16 that this evaluation has"):
        await controller.failed


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
        ('Traceback:\n  File "a.py", line 1\nOSError: no disk\nand no hope\n', "OSError: no disk"),
        ("", ""),
    ],
)
def test_I02_the_gist_of_a_failure_is_what_went_wrong(detail: str, said: str) -> None:
    assert gist(detail).endswith(said)


FRAME = 'Traceback (most recent call last):\n  File "reward.py", line 4, in reward\n    raise RuntimeError(answer)\n'


@pytest.mark.parametrize("message", ["boo " * 5000, "boo\n" * 5000], ids=["one line", "many lines"])
def test_I02_a_long_message_hides_neither_the_line_that_raised_nor_the_exception_s_class(message: str) -> None:
    told = excerpt(f"{FRAME}RuntimeError: {message}")
    assert told.startswith(f"{FRAME}RuntimeError: boo")
    assert told.endswith(message[-8:])
    assert len(told) <= DETAIL_CHARACTERS + len(" ... ")
    assert gist(told).startswith("RuntimeError: boo")
    assert len(gist(told)) <= LINE_CHARACTERS + len(" ... ")
