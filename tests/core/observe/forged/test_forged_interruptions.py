"""Logs of a run that interrupts, with a lie about an interruption: the audit catches it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from headrace.observe.lines import RecordLog
from support.interrupted_run import BOUND


@pytest.fixture
def log(interrupted: list[dict[str, Any]], tmp_path: Path, forger: Any) -> Any:
    """An honest log, in which there is something to lie about."""
    return forger(interrupted, tmp_path / "events.jsonl")


def mixed(log: Any) -> dict[str, Any]:
    """The end of a trained trajectory with tokens of two versions, of which its instance told in time."""
    trained = {row for event in log.all("batch_trained") for row in event["rows"]}
    told = {t for event in log.all("instance_switched") for t, _, _ in event["interrupted"]}
    found = [e for e in log.all("trajectory_finished") if len(e["spans"]) > 1 and e["trajectory"] in trained & told]
    chosen: dict[str, Any] = found[len(found) // 2]
    return chosen


def written(log: Any, path: Path) -> Any:
    with RecordLog(path) as records:
        for event in log.events:
            records.write(event)
    return audit_run(path)


def test_an_honest_log_passes_without_c1_and_says_so(log: Any, tmp_path: Path) -> None:
    result = written(log, tmp_path / "honest.jsonl")
    assert result.ok, result.violations[:5]
    assert result.verdict.startswith("PASS without C1: ")
    assert result.checked["interruption"] > 100
    text = str(result)
    assert "phase rl: any interrupts trajectories; they are not of a single policy (C1 is given up)" in text
    finished = {e["trajectory"]: e for e in log.all("trajectory_finished")}
    trained = [row for event in log.all("batch_trained") for row in event["rows"]]
    several = sum(len({version for version, _, _ in finished[row]["spans"]}) > 1 for row in trained)
    assert several > 3
    assert f"trained rows with tokens of several versions: {several} of {len(trained)}" in text
    interrupted = sum(len(event["interrupted"]) for event in log.all("instance_switched"))
    assert (result.summary["mixed"], result.summary["interrupted"]) == (several, interrupted)


def spans_with_a_hole(log: Any) -> None:
    event = mixed(log)
    event["spans"][-1][1] += 1


def more_tokens_than_were_sampled(log: Any) -> None:
    mixed(log)["spans"][-1][2] += 1


def versions_that_fall(log: Any) -> None:
    event = mixed(log)
    (old, _, middle), (new, _, stop) = event["spans"][0], event["spans"][-1]
    event["spans"] = [[new, 0, middle], [old, middle, stop]]


def a_version_that_the_instance_had_not_committed(log: Any) -> None:
    mixed(log)["spans"][-1][0] = 10_000


def a_version_that_the_instance_had_left_behind(log: Any) -> None:
    started = next(e for e in log.all("trajectory_started") if e["version"] > 2)
    event = log.one("trajectory_finished", trajectory=started["trajectory"])
    event["spans"] = [[started["version"] - 1, 0, event["response_tokens"]]]


def stale_tokens_said_to_be_new(log: Any) -> None:
    event = mixed(log)
    event["spans"] = [[event["spans"][-1][0], 0, event["response_tokens"]]]


def an_interruption_denied(log: Any) -> None:
    event = mixed(log)
    event["spans"] = [[event["spans"][0][0], 0, event["response_tokens"]]]


def a_row_that_claims_to_be_younger_than_its_oldest_token(log: Any) -> None:
    event = mixed(log)
    log.one("row_stored", row=event["trajectory"])["version"] = event["spans"][-1][0]


def a_start_under_a_version_older_than_the_ticket(log: Any) -> None:
    event = next(e for e in log.all("trajectory_started") if e["version"] > 0)
    event["version"] -= 1


def a_switch_to_a_version_that_was_not_committed(log: Any) -> None:
    log.one("instance_switched")["version"] += 1


@pytest.mark.parametrize(
    ("lie", "shown"),
    [
        (spans_with_a_hole, r"spans of trajectory \d+ cover 3 of its 3 tokens"),
        (more_tokens_than_were_sampled, r"spans of trajectory \d+ cover 4 of its 3 tokens"),
        (versions_that_fall, r"trajectory \d+ has tokens of version \[\d+, \d+\], one after the other"),
        (
            a_version_that_the_instance_had_not_committed,
            r"has tokens of versions \[10000\], which 'rollout-\d' had not committed",
        ),
        (
            a_version_that_the_instance_had_left_behind,
            r"has tokens of version \d+, when it started its instance generated under \d+",
        ),
        (stale_tokens_said_to_be_new, r"was interrupted after \d tokens to go on under version \d+, and reports"),
        (an_interruption_denied, r"was interrupted after \d tokens to go on under version \d+, and reports"),
        (a_row_that_claims_to_be_younger_than_its_oldest_token, r"row \d+ claims group \d+ and version \d+, it is of"),
        (a_start_under_a_version_older_than_the_ticket, r"trajectory \d+ started for group \d+ under version \d+"),
        (a_switch_to_a_version_that_was_not_committed, r"'rollout-\d' switched to version \d+ before it had committed"),
    ],
)
def test_a_lie_about_an_interruption_is_caught(log: Any, lie: Callable[[Any], None], shown: str) -> None:
    lie(log)
    log.assert_caught("interruption", shown)


def test_a_mixed_trajectory_under_a_policy_that_interrupts_nothing_is_caught(log: Any) -> None:
    log.one("phase_started")["interrupts"] = False
    log.assert_caught("one_version", r"trajectory \d+ has tokens of versions \[\d+, \d+\], its ticket is version \d+")


def test_an_interruption_under_a_policy_that_interrupts_nothing_is_caught(log: Any) -> None:
    log.one("phase_started")["interrupts"] = False
    log.assert_caught("one_version", r"went on under version \d+, in phase 'rl' whose policy interrupts nothing")


def test_an_interrupted_row_is_as_stale_as_its_oldest_token(log: Any) -> None:
    """Its newest token would be within the bound."""
    finished = {e["trajectory"]: e["spans"] for e in log.all("trajectory_finished")}
    ages = [
        (batch["version"] - finished[row][0][0], batch["version"] - finished[row][-1][0])
        for batch in log.all("batch_trained")
        for row in batch["rows"]
    ]
    worst = max(oldest for oldest, newest in ages if newest < oldest)
    assert worst <= BOUND
    log.one("phase_started")["max_staleness"] = worst - 1
    log.assert_caught("staleness", rf"staleness {worst}, max_staleness {worst - 1}")


def test_a_version_retired_while_answers_are_generated_under_it_is_caught(log: Any) -> None:
    switched = next(e for e in log.all("instance_switched") if e["interrupted"])
    before = log.events[switched["seq"] - 1]
    retired = log.one("version_retired")
    log.insert(before, {**retired, "version": switched["version"] - 1})
    log.assert_caught("window", rf"version {switched['version'] - 1} retired while trajectories \[.+\] are generated")


def test_an_interruption_of_a_trajectory_that_never_was_is_caught(log: Any) -> None:
    log.one("instance_switched")["interrupted"].append([10_000, 0, 3])
    log.assert_caught("conservation", "trajectory 10000 was interrupted, but never was")
