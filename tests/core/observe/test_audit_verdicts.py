"""What the audit accepts, what it counts, and how it reads on a screen."""

from __future__ import annotations

import copy
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import RunError
from headrace.observe.audit import RULES, AuditResult, audit_run
from headrace.observe.audit_result import format_audit
from headrace.observe.lines import RecordLog
from support.story import INSTANCE, Story

Log = list[dict[str, Any]]


def audited(events: Log, directory: Path) -> AuditResult:
    with RecordLog(directory / "events.jsonl") as log:
        for seq, event in enumerate(events):
            log.write({**event, "seq": seq})
    return audit_run(directory)


def index(events: Log, kind: str, **fields: Any) -> int:
    """The last event of the kind with these fields."""
    return max(
        i for i, e in enumerate(events) if e["kind"] == kind and all(e[name] == value for name, value in fields.items())
    )


def test_the_books_add_up(simulation: Any, run_dir: Path) -> None:
    summary = audit_run(run_dir).summary
    dispatched = sum(len(e["trajectories"]) for e in simulation.events if e["kind"] == "group_dispatched")
    assert summary["dispatched"] == dispatched
    assert summary["trained"] == 15 * 16
    assert summary["dropped"] == {"run_ended": dispatched - 15 * 16}
    assert summary["buffered"] == summary["in_flight"] == 0
    assert summary["batches"] == 15
    assert summary["versions_published"] == 16
    assert summary["optimizer_steps"] == 60


def test_the_staleness_histogram_sums_to_the_trained_rows(simulation: Any, run_dir: Path) -> None:
    ticket = {t: e["version"] for e in simulation.events if e["kind"] == "group_dispatched" for t in e["trajectories"]}
    batches = [e for e in simulation.events if e["kind"] == "batch_trained"]
    expected = Counter(e["version"] - ticket[row] for e in batches[3:] for row in e["rows"])
    staleness = audit_run(run_dir).summary["staleness"]
    assert staleness == {"warm-up": {0: 3 * 16}, "reinforce": dict(expected)}
    assert sum(staleness["reinforce"].values()) == 12 * 16


def test_greedy_answers_are_no_samples_whose_rewards_are_averaged(simulation: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulation.events)
    events[index(events, "phase_started", phase="reinforce")]["greedy"] = True
    sampled = [
        e["reward"]
        for e in events[index(events, "phase_started", phase="reinforce") :]
        if e["kind"] == "trajectory_scored" and e["trajectory"] % 4 < 3
    ]
    result = audited(events, tmp_path)
    assert result.ok, result.violations
    assert result.summary["scored"] == len(sampled)
    assert result.summary["mean_reward"] == pytest.approx(np.mean(sampled))


def test_a_synchronous_run_passes_with_staleness_zero_only(simulate: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulate(steps=1, warm_up=4).events)
    events[0]["phases"] = ["warm-up"]
    result = audited([*events[: index(events, "phase_started")], events[-1]], tmp_path)
    assert result.ok, result.violations
    assert result.summary["staleness"] == {"warm-up": {0: 64}}


def test_a_failed_try_may_be_repeated_under_the_same_version(simulation: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulation.events)
    i = index(events, "trajectory_started")
    started = events[i]
    failed = {**events[-2], "kind": "trajectory_failed", "trajectory": started["trajectory"], "reason": "node_lost"}
    del failed["trajectories"]
    failed |= {"group": started["group"], "attempt": 0}
    result = audited([*events[: i + 1], failed, {**started, "attempt": 1}, *events[i + 1 :]], tmp_path)
    assert result.ok, result.violations
    assert result.summary["failed_attempts"] == {"node_lost": 1}


def test_an_answer_may_be_made_again_until_it_is_stored(simulation: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulation.events)
    i = index(events, "trajectory_finished")
    trajectory = events[i]["trajectory"]
    started = events[index(events, "trajectory_started", trajectory=trajectory)]
    again = [{**started, "attempt": 1}, events[i]]
    assert audited([*events[: i + 1], *again, *events[i + 1 :]], tmp_path).ok


def test_late_reports_of_a_dropped_group_are_counted_and_no_fault(simulation: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulation.events)
    i = index(events, "row_stored")
    stored = events[i]
    group = events[index(events, "group_dispatched", group=stored["group"])]
    kept = [
        e
        for e in events
        if not (e["kind"] == "row_stored" and e["group"] == stored["group"])
        and not (e["kind"] == "group_dropped" and e["group"] == stored["group"])
    ]
    scored = index(kept, "trajectory_scored", trajectory=stored["trajectory"])
    drop = {**events[-2], "group": stored["group"], "trajectories": group["trajectories"], "reason": "failed"}
    result = audited([*kept[:scored], drop, *kept[scored:]], tmp_path)
    assert result.ok, result.violations
    assert result.summary["late_reports"] == 1
    assert "1 reports came after their group had been dropped" in format_audit(result)


def test_news_of_a_move_may_come_after_the_trajectory_has_finished_or_was_trained(
    simulation: Any, tmp_path: Path
) -> None:
    moves = [e for e in simulation.events if e["kind"] == "trajectory_moved"]
    first, *_, last = moves
    events = copy.deepcopy([e for e in simulation.events if e not in (first, last)])
    for move in (first, last):
        finished = index(events, "trajectory_finished", trajectory=move["trajectory"])
        events[finished]["instance"] = move["source"]
    events.insert(index(events, "trajectory_finished", trajectory=last["trajectory"]) + 1, last)
    events.insert(len(events) - 1, first)
    result = audited(events, tmp_path)
    assert result.ok, result.violations
    assert (result.summary["moves"], result.summary["prefilled_again"]) == (len(moves), 0)
    assert f"moves {len(moves)} · tokens prefilled again 0" in format_audit(result)


@pytest.mark.parametrize("named", [False, True], ids=["silently", "with_a_reason"])
def test_a_skipped_batch_uses_its_rows_up_and_keeps_the_version(named: bool, simulation: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulation.events)
    i = index(events, "batch_trained")
    events[i] |= {"applied": False, "optimizer_steps": 0}
    last = events[i]["version"] + 1
    after = [e for e in events[i + 1 :] if e.get("version") != last]
    groups = events[i]["groups"] if named else []
    drops = [
        {**events[-2], "group": g, "trajectories": list(range(4 * g, 4 * g + 4)), "reason": "not_finite"}
        for g in groups
    ]
    result = audited([*events[: i + 1], *drops, *after], tmp_path)
    assert result.ok, result.violations
    assert result.summary["skipped_batches"] == 1
    assert result.summary["dropped"]["not_finite" if named else "step_skipped"] == 16


def test_a_member_that_could_not_be_scored_keeps_its_group_whole_and_is_counted(
    simulation: Any, tmp_path: Path
) -> None:
    events = copy.deepcopy(simulation.events)
    trained = events[index(events, "batch_trained")]
    events[index(events, "trajectory_scored", trajectory=trained["rows"][0])]["reward"] = None
    trained["rewards"][0] = None
    result = audited(events, tmp_path)
    assert result.ok, result.violations
    assert result.summary["unscored"] == 1
    assert "1 trajectories in the batches could not be scored" in str(result)


@pytest.mark.parametrize(("scored", "read"), [(0.1, float(np.float32(0.1))), (1e39, None)], ids=["rounded", "infinite"])
def test_the_trainer_reads_rewards_in_single_precision(
    scored: float, read: Any, simulation: Any, tmp_path: Path
) -> None:
    events = copy.deepcopy(simulation.events)
    trained = events[index(events, "batch_trained")]
    events[index(events, "trajectory_scored", trajectory=trained["rows"][0])]["reward"] = scored
    trained["rewards"][0] = read
    result = audited(events, tmp_path)
    assert result.ok, result.violations


def test_a_stopped_run_may_leave_work_behind_and_says_so(simulation: Any, tmp_path: Path) -> None:
    events = [e for e in simulation.events if e["kind"] != "group_dropped"]
    result = audited([*events[:-1], {**events[-1], "status": "stopped", "reason": "interrupted"}], tmp_path)
    assert result.ok, result.violations
    assert result.summary["buffered"] + result.summary["in_flight"] == result.summary["dispatched"] - 15 * 16 > 0
    assert "the run stopped: what it had in flight and buffered was left behind" in format_audit(result)


def test_a_killed_run_with_half_a_last_line_is_audited_up_to_there(run_dir: Path) -> None:
    log = run_dir / "events.jsonl"
    lines = log.read_bytes().splitlines(keepends=True)
    log.write_bytes(b"".join(lines[:900]) + lines[900][:20])
    result = audit_run(run_dir)
    assert result.ok, result.violations
    assert not result.finished
    assert result.summary["events"] == 900
    assert result.summary["cut_short"]
    text = format_audit(result)
    assert result.verdict.startswith("PASS so far: 19 rules over 900 events")
    assert "line 901 is cut in the middle" in text
    assert "still going, or was killed" in text
    assert "covered: the 900 events of the first" in text
    assert max(len(line) for line in text.splitlines()) <= 80


@pytest.mark.parametrize(
    ("status", "note"),
    [
        ("completed", "; it follows the end of a completed run"),
        ("stopped", "; it follows the end: a resume was cut off"),
    ],
)
def test_half_a_line_after_the_end_is_said_to_follow_it(
    simulation: Any, tmp_path: Path, status: str, note: str
) -> None:
    events = [*simulation.events[:-1], {**simulation.events[-1], "status": status}]
    audited(events, tmp_path)
    log = tmp_path / "events.jsonl"
    with log.open("ab") as file:
        file.write(b'{"seq":')
    result = audit_run(log)
    assert result.ok
    assert not result.finished
    assert result.verdict.endswith("trained, log goes on")
    text = format_audit(result)
    assert f"line {len(events) + 1:,} is cut in the middle{note}" in text
    assert "was killed, or" not in text
    assert max(len(line) for line in text.splitlines()) <= 80


def test_a_log_without_its_end_passes_only_so_far(simulation: Any, tmp_path: Path) -> None:
    result = audited(simulation.events[:-1], tmp_path)
    assert result.ok
    assert not result.finished
    assert str(result).splitlines()[2].startswith("PASS so far: ")
    assert "cut in the middle" not in str(result)


def test_half_a_line_after_the_end_is_told_too(run_dir: Path) -> None:
    with open(run_dir / "events.jsonl", "ab") as log:
        log.write(b'{"seq": ')
    result = audit_run(run_dir)
    assert result.ok
    assert not result.finished


def test_an_unfinished_log_that_breaks_a_rule_fails(simulation: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulation.events[:-1])
    events[index(events, "instance_version")]["digest"] = "beef"
    assert audited(events, tmp_path).verdict.startswith("FAIL: 1 violation")


def test_a_log_can_be_named_by_file_or_directory(run_dir: Path) -> None:
    assert audit_run(run_dir) == audit_run(run_dir / "events.jsonl")


def test_a_directory_without_a_log_is_refused_with_a_fix(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="no event log at") as caught:
        audit_run(tmp_path)
    assert "directory of a run" in caught.value.fix
    assert caught.value.origin == str(tmp_path)


def test_an_empty_log_is_refused(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").touch()
    with pytest.raises(RunError, match=r"holds no event\n"):
        audit_run(tmp_path)
    (tmp_path / "events.jsonl").write_bytes(b'{"seq": 0')
    with pytest.raises(RunError, match="holds no event but half a line"):
        audit_run(tmp_path)


def test_the_text_fits_a_screen_and_tells_the_verdict_first(run_dir: Path) -> None:
    lines = format_audit(audit_run(run_dir), title="runs/sort-symbols-1").splitlines()
    assert lines[0] == "audit runs/sort-symbols-1"
    assert lines[2].startswith("PASS: 19 rules over 1,")
    assert lines[2].endswith(" events, 240 trajectories trained, none lost")
    assert len(lines) <= 40
    assert max(len(line) for line in lines) <= 80


def test_the_text_names_the_event_of_each_violation(simulation: Any, tmp_path: Path) -> None:
    events = copy.deepcopy(simulation.events)
    wrong = index(events, "instance_version")
    events[wrong]["digest"] = "beef"
    text = format_audit(audited(events, tmp_path))
    assert "FAIL: 1 violation of 1 rules in" in text
    assert f"event {wrong:>8}  weights: " in text
    assert "with digest beef, published was" in text


def test_violations_beyond_the_first_thousand_are_only_counted(simulation: Any, tmp_path: Path) -> None:
    events = [{**e, "epoch": 1} for e in simulation.events]
    result = audited(events, tmp_path)
    assert len(result.violations) == 1000
    assert result.violated["log"] == len(events)


def test_every_rule_has_a_lie() -> None:
    told = "".join(path.read_text() for path in (Path(__file__).parent / "forged").glob("test_*.py"))
    assert [rule for rule in RULES if f'("{rule}", ' not in told] == []


# ---------------------------------------------------------------- runs that lost nodes or were resumed


def test_an_honest_log_passes_every_rule_and_exercises_each(mishaps: Any, tmp_path: Path) -> None:
    result = audit_run(mishaps.write(tmp_path / "run"))
    assert result.ok, result.violations
    assert set(result.checked) == set(RULES) - {"interruption"}, "its policies interrupt nothing"


def test_what_a_resume_voids_counts_for_nothing(mishaps: Any, tmp_path: Path) -> None:
    first, second, third = (e for e in mishaps.events if e["kind"] == "resumed")
    assert first["events"] == second["events"], "the second resume makes the first void"
    result = audit_run(mishaps.write(tmp_path / "run"))
    summary = result.summary
    assert summary["resumed"] == 3
    assert summary["void_events"] == (second["seq"] - second["events"]) + (third["seq"] - third["events"])
    assert summary["trained"] == 15 * 16
    assert summary["batches"] == 15 < sum(e["kind"] == "batch_trained" for e in mishaps.events)
    assert ", resumed 3 times, 240 trajectories trained, none lost" in result.verdict
    assert f"{summary['void_events']:,} events are void" in str(result)


def test_lost_nodes_and_released_batches_are_counted_and_no_fault(mishaps: Any, tmp_path: Path) -> None:
    result = audit_run(mishaps.write(tmp_path / "run"))
    assert result.summary["lost_nodes"] == {"rollout-1": 1, "storage-0": 1}
    assert result.summary["failed_attempts"]["instance_lost"] > 0
    assert result.summary["dropped"]["storage_lost"] % 4 == 0
    assert "lost nodes: rollout-1 once, storage-0 once" in str(result)
    assert "batches 15 (1 released)" in str(result)


def test_an_instance_whose_engine_cannot_score_is_not_checked_when_it_was_started_again(
    mishaps: Any, tmp_path: Path
) -> None:
    again = next(e["seq"] for e in mishaps.events if e["kind"] == "node_stopped")
    check = next(e for e in mishaps.events if e["kind"] == "self_check" and e["seq"] > again)
    unchecked = (e for e in mishaps.events if e["kind"] != "self_check" or e["seq"] < check["seq"])
    standing = [e for e in unchecked if e["epoch"] == check["epoch"]]
    assert index(standing, "trajectory_started", instance="rollout-1") > check["seq"]
    result = audited(standing, tmp_path)
    assert result.ok, result.violations
    assert result.summary["lost_nodes"] == {"rollout-1": 1}


def test_nodes_that_end_with_the_run_are_not_lost(simulation: Any, tmp_path: Path) -> None:
    ended = {**simulation.events[1], "kind": "node_stopped", "reason": "ended"}
    result = audited([*simulation.events[:-1], ended, simulation.events[-1]], tmp_path)
    assert result.ok
    assert result.summary["lost_nodes"] == {}


def test_a_run_that_was_resumed_and_killed_again_passes_so_far(mishaps: Any, tmp_path: Path) -> None:
    resumed = [i for i, e in enumerate(mishaps.events) if e["kind"] == "resumed"]
    result = audited(mishaps.events[: resumed[0] + 1], tmp_path)
    assert result.ok, result.violations
    assert result.verdict.startswith("PASS so far: ")
    assert ", resumed once, " in result.verdict


@pytest.mark.parametrize("forgotten", [0, 1])
def test_a_group_may_begin_anew_after_two_resumes_but_not_be_forgotten(
    forgotten: int, mishaps: Any, tmp_path: Path
) -> None:
    resumed = next(e for e in mishaps.events if e["kind"] == "resumed")
    events, seq = mishaps.events[: resumed["seq"] + 1], resumed["seq"] + 1
    saved = {"seq": seq, "time": resumed["time"], "epoch": 1, "kind": "checkpoint_saved"}
    saved |= {"version": resumed["version"], "path": "runs/a/checkpoints/next", "events": seq}
    again = {**resumed, "seq": seq + 1, "epoch": 2, "events": seq, "checkpoint": "moved/checkpoints/next"}
    again["restarted"] = resumed["restarted"][forgotten:]
    result = audited([*events, saved, again], tmp_path)
    assert result.ok == (not forgotten), result.violations
    assert result.summary["void_events"] == resumed["seq"] - resumed["events"] + 1


# ---------------------------------------------------------------- instances that leave


@pytest.mark.parametrize("failed", [True, False])
def test_an_instance_may_leave_with_tries_that_failed_and_with_no_other(tmp_path: Path, failed: bool) -> None:
    story = Story(tmp_path)
    group = story.dispatch()
    if failed:
        for t in story.members(group):
            story.tell("trajectory_failed", trajectory=t, group=group, reason="instance_lost", attempt=0)
    story.tell("instance_draining", instance=INSTANCE)
    story.tell("instance_left", instance=INSTANCE)
    result = story.end("stopped")
    assert result.violated == ({} if failed else {"drained": 1})
