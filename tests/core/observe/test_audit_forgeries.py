"""A log with one lie in it fails the audit by the rule the lie breaks; the honest log passes."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import AuditResult, audit_run
from headrace.observe.audit_findings import RULES
from headrace.observe.lines import RecordLog

Event = dict[str, Any]
Log = list[Event]
REINFORCE = "reinforce"


def audited(events: Log, directory: Path) -> AuditResult:
    path = directory / "events.jsonl"
    path.unlink(missing_ok=True)
    log = RecordLog(path)
    for event in events:
        log.write(event)
    log.close()
    return audit_run(path)


def renumbered(events: Log) -> Log:
    """A forger numbers the lines again."""
    for seq, event in enumerate(events):
        event["seq"] = seq
    return events


def positions(events: Log, kind: str, **fields: Any) -> list[int]:
    """Where events of a kind with these fields are, in the reinforcement phase."""
    start = next(i for i, e in enumerate(events) if e["kind"] == "phase_started" and e["phase"] == REINFORCE)
    return [
        i
        for i, e in enumerate(events)
        if i >= start and e["kind"] == kind and all(e[name] == value for name, value in fields.items())
    ]


def one(events: Log, kind: str, **fields: Any) -> Event:
    """An event from the middle of the log."""
    found = positions(events, kind, **fields)
    return events[found[len(found) // 2]]


def without(events: Log, event: Event) -> Log:
    return renumbered([e for e in events if e is not event])


def inserted(events: Log, after: Event, new: Event) -> Log:
    position = next(i for i, e in enumerate(events) if e is after)
    return renumbered([*events[: position + 1], {**new}, *events[position + 1 :]])


def of_trained_group(events: Log) -> tuple[int, list[int]]:
    """A group that was trained, and its rows."""
    group = one(events, "batch_trained")["groups"][0]
    return group, one(events, "group_dispatched", group=group)["trajectories"]


# ---------------------------------------------------------------- the lies


def a_token_of_another_version(events: Log) -> Log:
    event = one(events, "trajectory_finished")
    (version, start, stop) = event["spans"][0]
    event["spans"] = [[version, start, stop - 1], [version + 1, stop - 1, stop]]
    return events


def a_span_of_another_version(events: Log) -> Log:
    one(events, "trajectory_finished")["spans"][0][0] += 1
    return events


def a_token_without_a_version(events: Log) -> Log:
    one(events, "trajectory_finished")["response_tokens"] += 1
    return events


def spans_with_a_hole(events: Log) -> Log:
    event = one(events, "trajectory_finished")
    version, start, stop = event["spans"][0]
    event["spans"] = [[version, start, 1], [version, 2, stop + 1]]
    return events


def a_demonstration_with_sampled_tokens(events: Log) -> Log:
    event = next(e for e in events if e["kind"] == "trajectory_finished" and not e["instance"])
    event["spans"] = [[0, 0, event["response_tokens"]]]
    return events


def a_start_under_another_version(events: Log) -> Log:
    one(events, "trajectory_started")["version"] -= 1
    return events


def a_row_that_claims_another_version(events: Log) -> Log:
    one(events, "row_stored")["version"] += 1
    return events


def a_batch_trained_twice(events: Log) -> Log:
    event = one(events, "batch_trained")
    return inserted(events, event, event)


def a_row_trained_again_in_a_later_batch(events: Log) -> Log:
    batches = positions(events, "batch_trained")
    earlier, later = events[batches[2]], events[batches[3]]
    later["rows"] = [earlier["rows"][0], *later["rows"][1:]]
    return events


def a_row_trained_that_was_never_stored(events: Log) -> Log:
    return without(events, one(events, "row_stored", row=of_trained_group(events)[1][0]))


def a_group_trained_that_was_never_dispatched(events: Log) -> Log:
    return without(events, one(events, "group_dispatched", group=of_trained_group(events)[0]))


def a_row_stored_twice(events: Log) -> Log:
    event = one(events, "row_stored")
    return inserted(events, event, event)


def a_trajectory_finished_twice(events: Log) -> Log:
    event = one(events, "trajectory_finished")
    return inserted(events, event, event)


def a_trajectory_finished_elsewhere(events: Log) -> Log:
    event = one(events, "trajectory_finished")
    event["instance"] = "rollout-1" if event["instance"] == "rollout-0" else "rollout-0"
    return events


def a_trajectory_started_twice_at_once(events: Log) -> Log:
    event = one(events, "trajectory_started")
    return inserted(events, event, event)


def a_trajectory_finished_that_was_never_started(events: Log) -> Log:
    return without(events, one(events, "trajectory_started"))


def a_group_dispatched_twice(events: Log) -> Log:
    event = one(events, "group_dispatched")
    return inserted(events, event, event)


def a_trajectory_dispatched_in_two_groups(events: Log) -> Log:
    found = positions(events, "group_dispatched")
    events[found[5]]["trajectories"][0] = events[found[4]]["trajectories"][0]
    return events


def a_dropped_group_that_is_trained_all_the_same(events: Log) -> Log:
    group, rows = of_trained_group(events)
    stored = one(events, "row_stored", row=rows[-1])
    return inserted(events, stored, {**events[-2], "group": group, "trajectories": rows, "reason": "failed"})


def a_trained_group_dropped_afterwards(events: Log) -> Log:
    group, rows = of_trained_group(events)
    return inserted(events, one(events, "batch_trained"), {**events[-2], "group": group, "trajectories": rows})


def a_row_stored_for_a_dropped_group(events: Log) -> Log:
    dropped = one(events, "group_dropped")
    row = {**one(events, "row_stored"), "row": 10_000, "trajectory": dropped["trajectories"][0]}
    return inserted(events, dropped, {**row, "group": dropped["group"]})


def a_group_forgotten_at_the_end(events: Log) -> Log:
    return without(events, one(events, "group_dropped"))


def a_group_carried_into_the_next_phase(events: Log) -> Log:
    border = events[positions(events, "phase_started")[0]]
    trained = [e for e in events if e["kind"] in ("batch_taken", "batch_trained") and e["seq"] < border["seq"]]
    return without(without(events, trained[-1]), trained[-2])


def a_trained_answer_that_was_cut_off(events: Log) -> Log:
    one(events, "trajectory_finished", trajectory=of_trained_group(events)[1][0])["finish_reason"] = "aborted"
    return events


def a_trained_answer_that_has_no_reward(events: Log) -> Log:
    one(events, "trajectory_scored", trajectory=of_trained_group(events)[1][0])["reward"] = None
    return events


def a_trained_answer_that_was_never_scored(events: Log) -> Log:
    return without(events, one(events, "trajectory_scored", trajectory=of_trained_group(events)[1][0]))


def a_bound_that_was_tighter_than_the_run(events: Log) -> Log:
    one(events, "phase_started")["max_staleness"] = 1
    return events


def old_tokens_under_a_fresh_claim(events: Log) -> Log:
    trained = events[positions(events, "batch_trained")[8]]
    finished = one(events, "trajectory_finished", trajectory=trained["rows"][0])
    finished["spans"][0][0] = trained["version"] - 3
    return events


def tokens_of_a_version_to_come(events: Log) -> Log:
    trained = one(events, "batch_trained")
    one(events, "trajectory_finished", trajectory=trained["rows"][0])["spans"][0][0] = trained["version"] + 1
    return events


def a_batch_without_one_member(events: Log) -> Log:
    for kind in ("batch_taken", "batch_trained"):
        event = one(events, kind)
        event["rows"] = event["rows"][1:]
    return events


def a_group_dropped_without_one_member(events: Log) -> Log:
    event = one(events, "group_dropped")
    event["trajectories"] = event["trajectories"][1:]
    return events


def a_group_of_the_wrong_size(events: Log) -> Log:
    one(events, "phase_started")["group_size"] = 5
    return events


def a_batch_without_one_group(events: Log) -> Log:
    for kind in ("batch_taken", "batch_trained"):
        event = one(events, kind)
        event["groups"], event["rows"] = event["groups"][1:], event["rows"][4:]
    return events


def a_batch_other_than_the_one_taken(events: Log) -> Log:
    event = one(events, "batch_trained")
    event["groups"] = [event["groups"][0] + 1000, *event["groups"][1:]]
    return events


def a_batch_never_taken(events: Log) -> Log:
    return without(events, one(events, "batch_taken"))


def a_batch_taken_while_one_is_trained(events: Log) -> Log:
    event = one(events, "batch_taken")
    return inserted(events, event, event)


def a_batch_trained_at_another_version(events: Log) -> Log:
    one(events, "batch_trained")["version"] += 1
    return events


def a_skipped_version(events: Log) -> Log:
    one(events, "version_published")["version"] += 1
    return events


def a_version_published_twice(events: Log) -> Log:
    event = one(events, "version_published")
    return inserted(events, event, event)


def a_version_made_by_a_skipped_step(events: Log) -> Log:
    one(events, "batch_trained")["applied"] = False
    return events


def a_batch_taken_at_a_version_not_yet_published(events: Log) -> Log:
    published = one(events, "version_published")
    taken = next(e for e in events if e["kind"] == "batch_taken" and e["seq"] > published["seq"])
    return inserted(without(events, published), taken, published)


def a_phase_that_forgets_the_version(events: Log) -> Log:
    one(events, "phase_started")["version"] = 0
    return events


def a_version_retired_twice(events: Log) -> Log:
    event = one(events, "version_retired")
    return inserted(events, event, event)


def weights_other_than_published(events: Log) -> Log:
    one(events, "instance_version")["digest"] = "0" * 16
    return events


def a_start_before_the_instance_has_the_weights(events: Log) -> Log:
    return without(events, one(events, "instance_version"))


def a_start_on_an_instance_that_was_restarted(events: Log) -> Log:
    start = one(events, "trajectory_started")
    stopped = {**events[1], "kind": "node_stopped", "node": start["instance"], "reason": "exit 1"}
    for name in ("role", "pid"):
        del stopped[name]
    before = events[next(i for i, e in enumerate(events) if e is start) - 1]
    return inserted(events, before, stopped)


def a_version_retired_in_use(events: Log) -> Log:
    retired = one(events, "version_retired")
    dispatched = one(events, "group_dispatched", version=retired["version"])
    return inserted(without(events, retired), dispatched, retired)


def a_group_under_a_retired_version(events: Log) -> Log:
    event = events[positions(events, "group_dispatched")[-1]]
    event["version"] = 3
    return events


def a_version_published_over_one_too_old(events: Log) -> Log:
    one(events, "phase_started")["max_staleness"] = 0
    return events


def a_version_retired_under_evaluation(events: Log) -> Log:
    started = one(events, "evaluation_started")
    retired = one(events, "version_retired", version=started["version"])
    return inserted(without(events, retired), started, retired)


def an_evaluation_answered_by_a_later_version(events: Log) -> Log:
    one(events, "evaluation_finished")["version_end"] += 1
    return events


def an_evaluation_filed_under_another_version(events: Log) -> Log:
    event = one(events, "evaluation_finished")
    event["version"] = event["version_end"] = event["version"] + 1
    return events


def an_evaluation_of_a_version_nobody_published(events: Log) -> Log:
    one(events, "evaluation_started")["version"] += 1000
    return events


def an_evaluation_that_never_ended(events: Log) -> Log:
    return without(events, one(events, "evaluation_finished"))


def a_missing_line(events: Log) -> Log:
    events.remove(one(events, "trajectory_scored"))
    return events


def an_exchanged_pair_of_lines(events: Log) -> Log:
    events[40], events[41] = events[41], events[40]
    return events


def a_line_after_the_end(events: Log) -> Log:
    return inserted(events, events[-1], events[1])


def no_beginning(events: Log) -> Log:
    return renumbered(events[1:])


def a_second_beginning(events: Log) -> Log:
    return inserted(events, events[0], events[0])


def another_epoch(events: Log) -> Log:
    events[50]["epoch"] = 1
    return events


def work_before_any_phase(events: Log) -> Log:
    return renumbered([e for e in events if e["kind"] != "phase_started"])


LIES: dict[str, tuple[Callable[[Log], Log], ...]] = {
    "one_version": (
        a_token_of_another_version,
        a_span_of_another_version,
        a_token_without_a_version,
        spans_with_a_hole,
        a_demonstration_with_sampled_tokens,
        a_start_under_another_version,
        a_row_that_claims_another_version,
    ),
    "conservation": (
        a_batch_trained_twice,
        a_row_trained_again_in_a_later_batch,
        a_row_trained_that_was_never_stored,
        a_group_trained_that_was_never_dispatched,
        a_row_stored_twice,
        a_trajectory_finished_twice,
        a_trajectory_finished_elsewhere,
        a_trajectory_started_twice_at_once,
        a_trajectory_finished_that_was_never_started,
        a_group_dispatched_twice,
        a_trajectory_dispatched_in_two_groups,
        a_dropped_group_that_is_trained_all_the_same,
        a_trained_group_dropped_afterwards,
        a_row_stored_for_a_dropped_group,
        a_group_forgotten_at_the_end,
        a_group_carried_into_the_next_phase,
    ),
    "scored": (
        a_trained_answer_that_was_cut_off,
        a_trained_answer_that_has_no_reward,
        a_trained_answer_that_was_never_scored,
    ),
    "staleness": (
        a_bound_that_was_tighter_than_the_run,
        old_tokens_under_a_fresh_claim,
        tokens_of_a_version_to_come,
    ),
    "whole_groups": (a_batch_without_one_member, a_group_dropped_without_one_member, a_group_of_the_wrong_size),
    "batch": (
        a_batch_without_one_group,
        a_batch_other_than_the_one_taken,
        a_batch_never_taken,
        a_batch_taken_while_one_is_trained,
        a_batch_trained_at_another_version,
    ),
    "versions": (
        a_skipped_version,
        a_version_published_twice,
        a_version_made_by_a_skipped_step,
        a_batch_taken_at_a_version_not_yet_published,
        a_phase_that_forgets_the_version,
        a_version_retired_twice,
    ),
    "weights": (
        weights_other_than_published,
        a_start_before_the_instance_has_the_weights,
        a_start_on_an_instance_that_was_restarted,
    ),
    "window": (
        a_version_retired_in_use,
        a_group_under_a_retired_version,
        a_version_published_over_one_too_old,
        a_version_retired_under_evaluation,
    ),
    "evaluation": (
        an_evaluation_answered_by_a_later_version,
        an_evaluation_filed_under_another_version,
        an_evaluation_of_a_version_nobody_published,
        an_evaluation_that_never_ended,
    ),
    "log": (
        a_missing_line,
        an_exchanged_pair_of_lines,
        a_line_after_the_end,
        no_beginning,
        a_second_beginning,
        another_epoch,
        work_before_any_phase,
    ),
}


@pytest.mark.parametrize(
    ("rule", "lie"), [pytest.param(rule, lie, id=lie.__name__) for rule, lies in LIES.items() for lie in lies]
)
def test_a_lie_is_caught_by_the_rule_it_breaks(
    rule: str, lie: Callable[[Log], Log], simulation: Any, tmp_path: Path
) -> None:
    forged = lie(copy.deepcopy(simulation.events))
    result = audited(forged, tmp_path)
    assert not result.ok
    assert rule in result.violated, result.violated
    broken = [v for v in result.violations if v.rule == rule]
    assert all(0 <= v.seq <= forged[-1]["seq"] and v.message for v in broken)


def test_every_rule_has_a_lie() -> None:
    assert LIES.keys() == RULES.keys()


def test_an_honest_log_passes_every_rule_and_exercises_each(simulation: Any, tmp_path: Path) -> None:
    result = audited(simulation.events, tmp_path)
    assert result.ok, result.violations
    assert result.violations == ()
    assert set(result.checked) == set(RULES)
