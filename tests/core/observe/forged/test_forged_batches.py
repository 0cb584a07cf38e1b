"""Logs with a lie about batches, versions or the log itself: caught by the rule it breaks, and its message shows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def a_bound_that_was_tighter_than_the_run(log: Any) -> None:
    log.one("phase_started")["max_staleness"] = 1


def old_tokens_under_a_fresh_claim(log: Any) -> None:
    trained = log.all("batch_trained")[8]
    finished = log.one("trajectory_finished", trajectory=trained["rows"][0])
    finished["spans"][0][0] = trained["version"] - 3


def tokens_of_a_version_to_come(log: Any) -> None:
    trained = log.one("batch_trained")
    log.one("trajectory_finished", trajectory=trained["rows"][0])["spans"][0][0] = trained["version"] + 1


def a_batch_without_one_member(log: Any) -> None:
    for kind in ("batch_taken", "batch_trained"):
        event = log.one(kind)
        event["rows"] = event["rows"][1:]


def a_row_trained_that_was_never_stored(log: Any) -> None:
    log.remove(log.one("row_stored", row=log.trained_group()[1][0]))


def a_group_dropped_without_one_member(log: Any) -> None:
    event = log.one("group_dropped")
    event["trajectories"] = event["trajectories"][1:]


def a_group_of_the_wrong_size(log: Any) -> None:
    log.one("phase_started")["group_size"] = 5


def a_batch_without_one_group(log: Any) -> None:
    for kind in ("batch_taken", "batch_trained"):
        event = log.one(kind)
        event["groups"], event["rows"] = event["groups"][1:], event["rows"][4:]


def a_batch_other_than_the_one_taken(log: Any) -> None:
    event = log.one("batch_trained")
    event["groups"] = [event["groups"][0] + 1000, *event["groups"][1:]]


def a_batch_never_taken(log: Any) -> None:
    log.remove(log.one("batch_taken"))


def a_batch_taken_while_one_is_trained(log: Any) -> None:
    event = log.one("batch_taken")
    log.insert(event, event)


def a_batch_trained_at_another_version(log: Any) -> None:
    log.one("batch_trained")["version"] += 1


def a_batch_never_trained(log: Any) -> None:
    log.remove(log.all("batch_trained")[-1])


def a_skipped_version(log: Any) -> None:
    log.one("version_published")["version"] += 1


def a_version_published_twice(log: Any) -> None:
    event = log.one("version_published")
    log.insert(event, event)


def a_version_made_by_a_skipped_step(log: Any) -> None:
    log.one("batch_trained")["applied"] = False


def a_batch_taken_at_a_version_not_yet_published(log: Any) -> None:
    published = log.one("version_published")
    taken = next(e for e in log.events if e["kind"] == "batch_taken" and e["seq"] > published["seq"])
    log.remove(published)
    log.insert(taken, published)


def a_phase_that_forgets_the_version(log: Any) -> None:
    log.one("phase_started")["version"] = 0


def a_version_retired_twice(log: Any) -> None:
    event = log.one("version_retired")
    log.insert(event, event)


def weights_other_than_published(log: Any) -> None:
    log.one("instance_version")["digest"] = "0" * 16


def of_self_check(log: Any, gap: float | None) -> None:
    next(e for e in log.events if e["kind"] == "self_check")["mean_abs_logprob_diff"] = gap


def an_engine_that_computes_something_else(log: Any) -> None:
    of_self_check(log, 0.25)


def an_engine_that_is_not_finite(log: Any) -> None:
    of_self_check(log, None)


def checks(log: Any, **fields: Any) -> list[Any]:
    return [e for e in log.events if e["kind"] == "self_check" and all(e[n] == value for n, value in fields.items())]


def a_run_without_its_last_check(log: Any) -> None:
    log.remove(checks(log)[-1])


def an_instance_that_was_never_checked(log: Any) -> None:
    for check in checks(log, instance="rollout-0"):
        log.remove(check)


def a_run_without_any_check(log: Any) -> None:
    for check in checks(log):
        log.remove(check)


def a_check_that_came_after_the_first_work(log: Any) -> None:
    (check,) = checks(log, instance="rollout-1")
    log.remove(check)
    log.insert(log.all("trajectory_started", instance="rollout-1")[0], check)


def a_start_before_the_instance_has_the_weights(log: Any) -> None:
    log.remove(log.one("instance_version"))


def a_start_on_an_instance_that_was_restarted(log: Any) -> None:
    start = log.one("trajectory_started")
    stopped = {**log.events[1], "kind": "node_stopped", "node": start["instance"], "reason": "exit 1"}
    for name in ("role", "pid"):
        del stopped[name]
    before = log.events[next(i for i, e in enumerate(log.events) if e is start) - 1]
    log.insert(before, stopped)


def a_version_retired_in_use(log: Any) -> None:
    retired = log.one("version_retired")
    dispatched = log.one("group_dispatched", version=retired["version"])
    log.remove(retired)
    log.insert(dispatched, retired)


def a_group_under_a_retired_version(log: Any) -> None:
    event = log.all("group_dispatched")[-1]
    event["version"] = 3


def a_version_published_over_one_too_old(log: Any) -> None:
    log.one("phase_started")["max_staleness"] = 0


def a_version_retired_under_evaluation(log: Any) -> None:
    started = log.one("evaluation_started")
    retired = log.one("version_retired", version=started["version"])
    log.remove(retired)
    log.insert(started, retired)


def an_evaluation_answered_by_a_later_version(log: Any) -> None:
    log.one("evaluation_finished")["version_end"] += 1


def an_evaluation_filed_under_another_version(log: Any) -> None:
    event = log.one("evaluation_finished")
    event["version"] = event["version_end"] = event["version"] + 1


def an_evaluation_of_a_version_nobody_published(log: Any) -> None:
    log.one("evaluation_started")["version"] += 1000


def an_evaluation_started_twice(log: Any) -> None:
    event = log.one("evaluation_started")
    log.insert(event, event)


def a_stage_that_was_left_out(log: Any) -> None:
    log.one("phase_started")["stages"] = ["reference"]


def an_evaluation_that_never_ended(log: Any) -> None:
    log.remove(log.one("evaluation_finished"))


def a_missing_line(log: Any) -> None:
    log.events.remove(log.one("trajectory_scored"))


def an_exchanged_pair_of_lines(log: Any) -> None:
    log.events[40], log.events[41] = log.events[41], log.events[40]


def a_line_after_the_end(log: Any) -> None:
    log.insert(log.events[-1], log.events[1])


def no_beginning(log: Any) -> None:
    log.remove(log.events[0])


def a_second_beginning(log: Any) -> None:
    log.insert(log.events[0], log.events[0])


def another_epoch(log: Any) -> None:
    log.events[50]["epoch"] = 1


def work_before_any_phase(log: Any) -> None:
    log.events = [e for e in log.events if e["kind"] != "phase_started"]
    log.renumber()


LIES: tuple[tuple[str, Callable[[Any], None], str], ...] = (
    ("staleness", a_bound_that_was_tighter_than_the_run, "staleness 2, max_staleness 1"),
    ("staleness", old_tokens_under_a_fresh_claim, "staleness 3, max_staleness 2"),
    ("staleness", tokens_of_a_version_to_come, "staleness -1, max_staleness 2"),
    ("whole_groups", a_batch_without_one_member, "not the stored rows of its groups: 1 missing, 0 too many"),
    ("whole_groups", a_row_trained_that_was_never_stored, "taken without its trajectory"),
    ("whole_groups", a_group_dropped_without_one_member, "dropped with 3 of its 4 trajectories"),
    ("whole_groups", a_group_of_the_wrong_size, "has 4 trajectories, group_size is 5"),
    ("stages", a_stage_that_was_left_out, r"taken before it went through the stages \['reference'\]"),
    ("batch", a_batch_without_one_group, "a batch of 3 groups"),
    ("batch", a_batch_other_than_the_one_taken, "is not the one taken at version"),
    ("batch", a_batch_never_taken, "is not the one taken, none was"),
    ("batch", a_batch_taken_while_one_is_trained, "taken while another is being trained"),
    ("batch", a_batch_trained_at_another_version, "is not the one taken at version"),
    ("batch", a_batch_never_trained, "completed with a batch taken and not trained"),
    ("versions", a_skipped_version, "but the applied batches make version"),
    ("versions", a_version_published_twice, "published after version"),
    ("versions", a_version_made_by_a_skipped_step, "but the applied batches make version"),
    ("versions", a_batch_taken_at_a_version_not_yet_published, "a batch taken at version .* published last was"),
    ("versions", a_phase_that_forgets_the_version, "starts at version 0, the trainer was at 3"),
    ("versions", a_version_retired_twice, "retired, but it was not live"),
    ("weights", weights_other_than_published, "with digest 0000000000000000, published was"),
    ("weights", a_start_before_the_instance_has_the_weights, "before the instance committed it"),
    ("weights", a_start_on_an_instance_that_was_restarted, "before the instance committed it"),
    ("agreement", an_engine_that_computes_something_else, r"rollout-0 .* differ by 0\.25 nats .* tolerance 0\.001"),
    ("agreement", an_engine_that_is_not_finite, "differ by NaN nats"),
    ("agreement", an_engine_that_is_not_finite, "on 'rollout-0', whose process had passed no self-check"),
    ("agreement", a_run_without_its_last_check, "on 'rollout-1', whose process had passed no self-check"),
    ("agreement", an_instance_that_was_never_checked, "on 'rollout-0', whose process had passed no self-check"),
    ("agreement", a_run_without_any_check, "on 'rollout-0', whose process had passed no self-check"),
    ("agreement", a_check_that_came_after_the_first_work, "on 'rollout-1', whose process had passed no"),
    ("window", a_version_retired_in_use, r"retired with \d+ groups in flight"),
    ("window", a_group_under_a_retired_version, "under version 3, which is not live"),
    ("window", a_version_published_over_one_too_old, "is in flight, max_staleness 0"),
    ("window", a_version_published_over_one_too_old, "2 versions in flight, max_staleness 0"),
    ("window", a_version_retired_under_evaluation, "retired while it was being evaluated"),
    ("evaluation", an_evaluation_answered_by_a_later_version, r"has answers of version \d+"),
    ("evaluation", an_evaluation_filed_under_another_version, "finished without having started"),
    ("evaluation", an_evaluation_of_a_version_nobody_published, "which is not live or already being"),
    ("evaluation", an_evaluation_started_twice, "which is not live or already being"),
    ("evaluation", an_evaluation_that_never_ended, "completed with evaluations of versions"),
    ("log", a_missing_line, r"seq \d+ where \d+ was due"),
    ("log", an_exchanged_pair_of_lines, "seq 41 where 40 was due"),
    ("log", a_line_after_the_end, "an event after run_finished"),
    ("log", no_beginning, "does not begin with run_started"),
    ("log", a_second_beginning, "a second run_started"),
    ("log", another_epoch, "epoch 1 where 0 was due"),
    ("log", work_before_any_phase, "dispatched before any phase"),
    ("log", work_before_any_phase, "a batch taken before any phase"),
)


@pytest.mark.parametrize(("rule", "lie", "shown"), [pytest.param(*lie, id=lie[1].__name__) for lie in LIES])
def test_a_lie_is_caught_by_the_rule_it_breaks(rule: str, lie: Callable[[Any], None], shown: str, log: Any) -> None:
    lie(log)
    log.assert_caught(rule, shown)
