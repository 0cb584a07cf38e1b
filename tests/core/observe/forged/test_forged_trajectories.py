"""Logs with a lie about a trajectory: the audit catches it by the rule it breaks, and its message shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def a_token_of_another_version(log: Any) -> None:
    event = log.one("trajectory_finished")
    (version, start, stop) = event["spans"][0]
    event["spans"] = [[version, start, stop - 1], [version + 1, stop - 1, stop]]


def a_span_of_another_version(log: Any) -> None:
    log.one("trajectory_finished")["spans"][0][0] += 1


def a_token_without_a_version(log: Any) -> None:
    log.one("trajectory_finished")["response_tokens"] += 1


def spans_with_a_hole(log: Any) -> None:
    event = log.one("trajectory_finished")
    version, start, stop = event["spans"][0]
    event["spans"] = [[version, start, 1], [version, 2, stop + 1]]


def a_demonstration_with_sampled_tokens(log: Any) -> None:
    event = next(e for e in log.events if e["kind"] == "trajectory_finished" and not e["instance"])
    event["spans"] = [[0, 0, event["response_tokens"]]]


def a_start_under_another_version(log: Any) -> None:
    log.one("trajectory_started")["version"] -= 1


def a_row_that_claims_another_version(log: Any) -> None:
    log.one("row_stored")["version"] += 1


def a_batch_trained_twice(log: Any) -> None:
    event = log.one("batch_trained")
    log.insert(event, event)


def a_row_trained_again_in_a_later_batch(log: Any) -> None:
    earlier, later = log.all("batch_trained")[2:4]
    later["rows"] = [earlier["rows"][0], *later["rows"][1:]]


def a_row_trained_that_was_never_stored(log: Any) -> None:
    log.remove(log.one("row_stored", row=log.trained_group()[1][0]))


def a_group_trained_that_was_never_dispatched(log: Any) -> None:
    log.remove(log.one("group_dispatched", group=log.trained_group()[0]))


def a_row_stored_twice(log: Any) -> None:
    event = log.one("row_stored")
    log.insert(event, event)


def a_trajectory_finished_twice(log: Any) -> None:
    event = log.one("trajectory_finished")
    log.insert(event, event)


def a_trajectory_finished_elsewhere(log: Any) -> None:
    event = log.one("trajectory_finished")
    event["instance"] = "rollout-1" if event["instance"] == "rollout-0" else "rollout-0"


def a_trajectory_started_twice_at_once(log: Any) -> None:
    event = log.one("trajectory_started")
    log.insert(event, event)


def a_trajectory_finished_that_was_never_started(log: Any) -> None:
    log.remove(log.one("trajectory_started"))


def a_group_dispatched_twice(log: Any) -> None:
    event = log.one("group_dispatched")
    log.insert(event, event)


def a_trajectory_dispatched_in_two_groups(log: Any) -> None:
    earlier, later = log.all("group_dispatched")[4:6]
    later["trajectories"][0] = earlier["trajectories"][0]


def a_dropped_group_that_is_trained_all_the_same(log: Any) -> None:
    group, rows = log.trained_group()
    stored = log.one("row_stored", row=rows[-1])
    log.insert(stored, {**log.events[-2], "group": group, "trajectories": rows, "reason": "failed"})


def a_trained_group_dropped_afterwards(log: Any) -> None:
    group, rows = log.trained_group()
    log.insert(log.one("batch_trained"), {**log.events[-2], "group": group, "trajectories": rows})


def a_row_stored_for_a_dropped_group(log: Any) -> None:
    dropped = log.one("group_dropped")
    row = {**log.one("row_stored"), "row": 10_000, "trajectory": dropped["trajectories"][0]}
    log.insert(dropped, {**row, "group": dropped["group"]})


def a_group_forgotten_at_the_end(log: Any) -> None:
    log.remove(log.one("group_dropped"))


def a_group_carried_into_the_next_phase(log: Any) -> None:
    border = log.all("phase_started")[0]
    trained = [e for e in log.events if e["kind"] in ("batch_taken", "batch_trained") and e["seq"] < border["seq"]]
    log.remove(trained[-1])
    log.remove(trained[-2])


def a_trained_answer_that_was_cut_off(log: Any) -> None:
    log.one("trajectory_finished", trajectory=log.trained_group()[1][0])["finish_reason"] = "aborted"


def a_trained_answer_that_was_never_scored(log: Any) -> None:
    log.remove(log.one("trajectory_scored", trajectory=log.trained_group()[1][0]))


def a_better_reward(log: Any) -> None:
    trajectory = log.trained_group()[1][0]
    event = log.one("trajectory_scored", trajectory=trajectory)
    event["reward"] = 1.0 - event["reward"]


def two_exchanged_rewards(log: Any) -> None:
    trained = log.one("batch_trained")
    scored = {row: log.one("trajectory_scored", trajectory=row) for row in trained["rows"]}
    good, bad = (next(e for e in scored.values() if e["reward"] == value) for value in (1.0, 0.0))
    good["reward"], bad["reward"] = 0.0, 1.0


def a_reward_taken_away(log: Any) -> None:
    log.one("trajectory_scored", trajectory=log.trained_group()[1][0])["reward"] = None


def a_trajectory_scored_twice(log: Any) -> None:
    event = log.one("trajectory_scored")
    log.insert(event, event)


def a_reward_that_the_trainer_never_read(log: Any) -> None:
    log.one("batch_trained")["rewards"].pop()


def leaves(log: Any, after: Any, name: str, *, asked: bool = True) -> Any:
    """Insert that an instance leaves."""
    told = {"time": after["time"], "epoch": after["epoch"], "instance": name}
    left = {**told, "kind": "instance_left"}
    log.insert(after, left)
    if asked:
        log.insert(after, {**told, "kind": "instance_draining"})
    return left


def an_instance_that_leaves_with_work(log: Any) -> None:
    started = log.one("trajectory_started")
    leaves(log, started, started["instance"])


def an_instance_that_leaves_unasked(log: Any) -> None:
    leaves(log, log.one("batch_trained"), "rollout-1", asked=False)


def work_for_an_instance_that_left(log: Any) -> None:
    leaves(log, log.all("version_published")[0], "rollout-1")


def a_move_under_another_version(log: Any) -> None:
    log.one("trajectory_moved")["version"] -= 1


def a_move_to_who_has_not_the_version(log: Any) -> None:
    event = log.one("trajectory_moved")
    committed = [e for e in log.events if e["kind"] == "instance_version" and e["version"] == event["version"]]
    log.remove(next(e for e in committed if e["instance"] == event["target"]))


def a_move_from_where_it_was_not(log: Any) -> None:
    event = log.one("trajectory_moved")
    event["source"], event["target"] = event["target"], event["source"]


def a_move_to_where_it_was(log: Any) -> None:
    event = log.one("trajectory_moved")
    event["target"] = event["source"]


def a_move_of_another_try(log: Any) -> None:
    log.one("trajectory_moved")["attempt"] += 1


def a_move_left_out(log: Any) -> None:
    log.remove(log.one("trajectory_moved"))


def a_move_of_nobody(log: Any) -> None:
    log.one("trajectory_moved")["trajectory"] = 100_000


LIES: tuple[tuple[str, Callable[[Any], None], str], ...] = (
    ("one_version", a_token_of_another_version, r"has tokens of versions \[\d+, \d+\]"),
    ("one_version", a_span_of_another_version, "has tokens of versions"),
    ("one_version", a_token_without_a_version, "the spans of trajectory .* cover"),
    ("one_version", spans_with_a_hole, "the spans of trajectory .* cover"),
    ("one_version", a_demonstration_with_sampled_tokens, "cover 12 of its 0 tokens"),
    ("one_version", a_start_under_another_version, "started for group .* under version"),
    ("one_version", a_row_that_claims_another_version, "row .* claims group"),
    ("one_version", a_move_under_another_version, "moved as one of group .* under version"),
    ("moves", a_move_to_who_has_not_the_version, "moved from .* under version .* which not both had committed"),
    ("moves", a_move_from_where_it_was_not, "moved from .* in attempt 0; the log has it on"),
    ("moves", a_move_to_where_it_was, r"moved from '(.*)' to '\1'"),
    ("moves", a_move_of_another_try, "in attempt 1; the log has it on .*, attempt 0"),
    ("conservation", a_move_left_out, "finished on 'rollout-.'; the log has it"),
    ("conservation", a_move_of_nobody, "trajectory 100000 moved, but never was"),
    ("conservation", a_batch_trained_twice, "row .* trained, but it was trained"),
    ("conservation", a_batch_trained_twice, r"dispatched \d+ ≠ trained 256 \+ buffered 0"),
    ("conservation", a_row_trained_again_in_a_later_batch, "row .* trained, but it was trained"),
    ("conservation", a_row_trained_that_was_never_stored, "row .* trained, but it was never stored"),
    ("conservation", a_group_trained_that_was_never_dispatched, "group .* taken, but it was .* never dispatched"),
    ("conservation", a_group_trained_that_was_never_dispatched, "trajectory .* started, but it was never dispatched"),
    ("conservation", a_row_stored_twice, "row .* stored twice"),
    ("conservation", a_trajectory_finished_twice, "finished: True"),
    ("conservation", a_trajectory_finished_elsewhere, "finished on 'rollout-.'; the log has it"),
    ("conservation", a_trajectory_started_twice_at_once, "started again as attempt 0 after attempt 0"),
    ("conservation", a_trajectory_finished_that_was_never_started, "attempt -1, finished: False"),
    ("conservation", a_group_dispatched_twice, "was dispatched before"),
    ("conservation", a_trajectory_dispatched_in_two_groups, "was dispatched before"),
    ("conservation", a_dropped_group_that_is_trained_all_the_same, "row .* trained, but it was dropped"),
    ("conservation", a_trained_group_dropped_afterwards, "group .* dropped, but it was trained"),
    ("conservation", a_row_stored_for_a_dropped_group, "row 10000 stored twice, or for .* was dropped"),
    ("conservation", a_group_forgotten_at_the_end, "completed with .* buffered and .* in flight"),
    ("conservation", a_group_carried_into_the_next_phase, "groups of an earlier phase are neither trained"),
    ("scored", a_trained_answer_that_was_cut_off, "taken with finish reason 'aborted'"),
    ("scored", a_trained_answer_that_was_never_scored, "judged: False"),
    ("drained", an_instance_that_leaves_with_work, r"left with trajectories \[.*\] unfinished"),
    ("drained", an_instance_that_leaves_unasked, "rollout-1 left and was not draining"),
    ("drained", work_for_an_instance_that_left, r"rollout-1 committed version \d+ after it had left"),
    ("weights", work_for_an_instance_that_left, "started on 'rollout-1' .* before the instance committed it"),
    ("rewards", a_better_reward, r"row .* was scored (0|1)\.0, the trainer read (?!\1)"),
    ("rewards", two_exchanged_rewards, r"was scored 0\.0, the trainer read 1\.0"),
    ("rewards", two_exchanged_rewards, r"was scored 1\.0, the trainer read 0\.0"),
    ("rewards", a_reward_taken_away, "was scored None, the trainer read"),
    ("rewards", a_trajectory_scored_twice, "scored .*, before it was"),
    ("rewards", a_reward_that_the_trainer_never_read, "read 15 rewards with 16 rows"),
)


@pytest.mark.parametrize(("rule", "lie", "shown"), [pytest.param(*lie, id=lie[1].__name__) for lie in LIES])
def test_a_lie_is_caught_by_the_rule_it_breaks(rule: str, lie: Callable[[Any], None], shown: str, log: Any) -> None:
    lie(log)
    log.assert_caught(rule, shown)
