"""Logs with a lie about a lost node or a resume: caught by the rule it breaks, and its message shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def last_resume(log: Any) -> Any:
    return log.all("resumed")[-1]


def after_last_resume(log: Any, kind: str) -> Any:
    """The first event of the kind in the last epoch."""
    return log.all(kind, epoch=last_resume(log)["epoch"])[0]


def claim_state(log: Any, events: int) -> None:
    """The last checkpoint and the resume from it agree on another state."""
    log.all("checkpoint_saved")[-1]["events"] = last_resume(log)["events"] = events


# ---------------------------------------------------------------- what a resume goes on from


def a_void_range_that_hides_a_trained_batch(log: Any) -> None:
    hidden = next(e for e in reversed(log.all("batch_taken")) if e["seq"] < last_resume(log)["events"])
    last_resume(log)["events"] = hidden["seq"]


def a_checkpoint_that_helps_to_hide_a_trained_batch(log: Any) -> None:
    hidden = next(e for e in reversed(log.all("batch_taken")) if e["seq"] < last_resume(log)["events"])
    claim_state(log, hidden["seq"])


def a_void_range_that_spares_a_batch(log: Any) -> None:
    spared = next(e for e in log.all("batch_trained") if e["seq"] >= last_resume(log)["events"])
    last_resume(log)["events"] = spared["seq"] + 1


def a_resume_from_no_checkpoint(log: Any) -> None:
    log.remove(log.all("checkpoint_saved")[-1])


def a_resume_from_another_directory(log: Any) -> None:
    last_resume(log)["checkpoint"] = "elsewhere"


def a_resume_at_another_version(log: Any) -> None:
    last_resume(log)["version"] += 1


def a_checkpoint_of_a_state_to_come(log: Any) -> None:
    checkpoint = log.all("checkpoint_saved")[-1]
    checkpoint["events"] = checkpoint["seq"] + 1


def a_checkpoint_of_a_state_of_an_earlier_epoch(log: Any) -> None:
    log.all("checkpoint_saved")[-1]["events"] = log.all("resumed")[0]["seq"]


def a_state_saved_while_a_batch_was_trained(log: Any) -> None:
    taken = next(e for e in log.all("batch_taken") if e["seq"] >= last_resume(log)["events"])
    checkpoint = log.all("checkpoint_saved")[-1]
    log.remove(checkpoint)
    log.insert(taken, checkpoint)
    claim_state(log, taken["seq"] + 1)


# ---------------------------------------------------------------- epochs


def an_epoch_that_is_not_raised(log: Any) -> None:
    last_resume(log)["epoch"] -= 1


def an_event_of_the_epoch_before(log: Any) -> None:
    after_last_resume(log, "batch_trained")["epoch"] -= 1


def a_missing_line_among_void_ones(log: Any) -> None:
    void = next(e for e in log.all("trajectory_scored") if e["seq"] > last_resume(log)["events"])
    log.events.remove(void)


# ---------------------------------------------------------------- what was in flight


def a_trained_group_that_begins_anew(log: Any) -> None:
    last_resume(log)["restarted"].append(log.all("batch_trained")[0]["groups"][0])


def a_stored_group_that_begins_anew(log: Any) -> None:
    first = after_last_resume(log, "batch_taken")
    dispatched = {e["group"] for e in log.all("group_dispatched", epoch=first["epoch"])}
    last_resume(log)["restarted"].append(next(g for g in first["groups"] if g not in dispatched))


def a_group_that_begins_anew_twice(log: Any) -> None:
    last_resume(log)["restarted"].append(last_resume(log)["restarted"][0])


def a_group_in_flight_that_is_forgotten(log: Any) -> None:
    last_resume(log)["restarted"].pop()


def a_group_that_never_began_anew(log: Any) -> None:
    log.remove(after_last_resume(log, "group_dispatched"))


def a_group_that_begins_anew_with_other_members(log: Any) -> None:
    after_last_resume(log, "group_dispatched")["trajectories"][0] += 10_000


# ---------------------------------------------------------------- weights


def other_weights_published_again(log: Any) -> None:
    after_last_resume(log, "version_published")["digest"] = "beef"


def a_version_that_is_not_published_again(log: Any) -> None:
    log.remove(after_last_resume(log, "version_published"))


def a_start_on_an_instance_that_did_not_commit_again(log: Any) -> None:
    log.remove(after_last_resume(log, "instance_version"))


def a_group_under_a_version_from_before_the_resume(log: Any) -> None:
    after_last_resume(log, "group_dispatched")["version"] -= 1


# ---------------------------------------------------------------- lost nodes


def a_resume_without_its_last_check(log: Any) -> None:
    log.remove(log.all("self_check")[-1])


def a_process_in_anothers_place_that_was_not_checked(log: Any) -> None:
    started = log.all("node_started", node="rollout-1")[0]
    check = next(e for e in log.all("self_check", instance="rollout-1") if e["seq"] > started["seq"])
    log.remove(check)
    told = log.all("instance_version", instance="rollout-0")[-1]
    scored = {**check, "time": told["time"], "epoch": told["epoch"], "instance": "rollout-0"}
    log.insert(log.events[told["seq"] - 1], {**scored, "version": told["version"]})  # so its engine can score


def a_start_on_a_lost_instance(log: Any) -> None:
    stopped = log.all("node_stopped", node="rollout-1")[0]
    again = next(e for e in log.all("trajectory_started", attempt=1) if e["seq"] > stopped["seq"])
    again["instance"] = "rollout-1"


def a_try_that_is_repeated_under_its_own_number(log: Any) -> None:
    log.all("trajectory_started", attempt=1)[0]["attempt"] = 0


def an_answer_of_a_lost_instance(log: Any) -> None:
    again = log.all("trajectory_started", attempt=1)[0]
    log.one("trajectory_finished", trajectory=again["trajectory"])["instance"] = "rollout-1"


def a_released_batch_other_than_the_one_taken(log: Any) -> None:
    log.one("batch_released")["groups"][0] += 1000


def a_batch_released_that_was_never_taken(log: Any) -> None:
    released = log.one("batch_released")
    log.insert(released, released)


def a_batch_trained_that_was_released(log: Any) -> None:
    released = log.one("batch_released")
    trained = {**log.one("batch_trained"), **{name: released[name] for name in ("version", "groups", "rows")}}
    log.insert(released, trained)


LIES: tuple[tuple[str, Callable[[Any], None], str], ...] = (
    ("resume", a_void_range_that_hides_a_trained_batch, "no such checkpoint was saved"),
    (
        "resume",
        a_checkpoint_that_helps_to_hide_a_trained_batch,
        "goes on at version 10, the .* batches make version 9",
    ),
    ("resume", a_void_range_that_spares_a_batch, "no such checkpoint was saved"),
    ("resume", a_void_range_that_spares_a_batch, "goes on at version 10, the applied batches make version 11"),
    ("resume", a_resume_from_no_checkpoint, "no such checkpoint was saved"),
    ("resume", a_resume_from_another_directory, "from elsewhere with version 10 .* no such checkpoint was saved"),
    ("resume", a_resume_at_another_version, "with version 11 .* no such checkpoint was saved"),
    ("resume", a_checkpoint_of_a_state_to_come, "a checkpoint claims a state of"),
    ("resume", a_checkpoint_of_a_state_of_an_earlier_epoch, "a checkpoint claims a state of"),
    ("resume", a_state_saved_while_a_batch_was_trained, "from a state with a batch taken"),
    ("resume", a_trained_group_that_begins_anew, "is to begin anew, but it was not live"),
    ("resume", a_stored_group_that_begins_anew, "is to begin anew, but it was stored"),
    ("resume", a_group_that_begins_anew_twice, "named before"),
    ("resume", a_group_in_flight_that_is_forgotten, r"groups \[\d+\] are neither stored nor among those"),
    ("resume", a_group_that_never_began_anew, r"dispatched before the groups \[\d+\] that were to begin anew"),
    ("resume", a_group_that_begins_anew_with_other_members, "begins anew with trajectories"),
    ("log", an_epoch_that_is_not_raised, "epoch 2 where 3 was due"),
    ("log", an_event_of_the_epoch_before, "epoch 2 where 3 was due"),
    ("log", a_missing_line_among_void_ones, r"seq \d+ where \d+ was due"),
    ("weights", other_weights_published_again, "version 10 published again with digest beef, before it was"),
    ("versions", a_version_that_is_not_published_again, "a batch taken at version 10; .* published last was 9"),
    ("weights", a_start_on_an_instance_that_did_not_commit_again, "before the instance committed it"),
    ("window", a_group_under_a_version_from_before_the_resume, "under version 9, which is not live"),
    ("agreement", a_resume_without_its_last_check, "whose process had passed no self-check"),
    (
        "agreement",
        a_process_in_anothers_place_that_was_not_checked,
        "on 'rollout-1', whose process had passed no self-check",
    ),
    ("weights", a_start_on_a_lost_instance, "on 'rollout-1' under version .* before the instance committed it"),
    ("conservation", a_try_that_is_repeated_under_its_own_number, "started again as attempt 0 after attempt 0"),
    ("conservation", an_answer_of_a_lost_instance, "finished on 'rollout-1'; the log has it .* on 'rollout-0'"),
    ("batch", a_released_batch_other_than_the_one_taken, "the batch released at version .* is not the one taken"),
    ("batch", a_batch_released_that_was_never_taken, "the batch released .* is not the one taken, none was"),
    ("batch", a_batch_trained_that_was_released, "the batch trained .* is not the one taken, none was"),
)


@pytest.mark.parametrize(("rule", "lie", "shown"), [pytest.param(*lie, id=lie[1].__name__) for lie in LIES])
def test_a_lie_is_caught_by_the_rule_it_breaks(
    rule: str, lie: Callable[[Any], None], shown: str, mishap_log: Any
) -> None:
    lie(mishap_log)
    mishap_log.assert_caught(rule, shown)
