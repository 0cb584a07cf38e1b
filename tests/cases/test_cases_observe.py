"""Cases about what a run leaves behind: the audit, the report and the console, on logs written by hand."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import AuditResult
from headrace.observe.events import EvaluationFinished, read_events
from headrace.observe.lines import RecordLog
from headrace.observe.observers import ObserverManager
from headrace.observe.records import read_evaluations
from headrace.observe.report_data import collect
from headrace.observe.report_figures import distribution_gap, lengths
from headrace_observers.console import Console
from headrace_observers.progress import Progress
from support.story import INSTANCE, MEMBERS, Story


@pytest.fixture
def story(tmp_path: Path) -> Story:
    return Story(tmp_path)


def broken(result: AuditResult) -> dict[str, str]:
    """Rule → its first message."""
    return {v.rule: v.message for v in reversed(result.violations)}


# ---------------------------------------------------------------- J01


def test_J01_discarded_surplus_does_not_go_unnoticed(story: Story) -> None:
    kept, surplus = story.dispatch(), story.dispatch()
    story.finish(kept)
    story.finish(surplus)
    story.train(kept)
    result = story.end()
    assert result.summary["dispatched"] == 4
    assert (result.summary["trained"], result.summary["buffered"]) == (2, 2)
    assert "completed with 2 trajectories buffered and 0 in flight" in broken(result)["conservation"]


def test_J01_surplus_that_is_dropped_by_name_is_accounted_for(story: Story) -> None:
    kept, surplus = story.dispatch(), story.dispatch()
    story.finish(kept)
    story.train(kept)
    story.tell("group_dropped", group=surplus, trajectories=story.members(surplus), reason="run_ended")
    result = story.end()
    assert result.ok, result.violations
    assert result.summary["dropped"] == {"run_ended": 2}


# ---------------------------------------------------------------- F


@pytest.mark.parametrize(("crossed", "accepted"), [(0, True), (2, True), (3, False)])
def test_F02_the_audit_accepts_n_crossed_updates_and_convicts_one_more(
    crossed: int, accepted: bool, story: Story
) -> None:
    old = story.dispatch()
    story.finish(old)
    for _ in range(crossed):
        story.step()
    story.train(old)
    result = story.end()
    assert result.summary["staleness"]["rl"][crossed] == 2
    assert ("staleness" not in result.violated) == accepted


def test_F02_a_version_counted_twice_for_one_update_is_convicted(story: Story) -> None:
    story.step()
    story.publish()
    assert "the applied batches make version 1" in broken(story.end())["versions"]


def test_F03_a_version_that_goes_back_is_convicted(story: Story) -> None:
    story.step()
    story.step()
    story.tell("version_published", version=1, digest="d1", nbytes=1)
    assert broken(story.end())["versions"] == "version 1 published after version 2"


def test_F03_negative_staleness_is_convicted(story: Story) -> None:
    story.step()
    group = story.dispatch()
    story.finish(group)
    story.train(group, version=0)
    assert "staleness -1" in broken(story.end())["staleness"]


def test_F04_staleness_is_of_the_oldest_token_and_two_versions_are_convicted(story: Story) -> None:
    for _ in range(3):
        story.step()
    group = story.dispatch()
    story.finish(group, spans=[(1, 0, 1), (3, 1, 4)], trajectory=story.members(group)[0])
    story.train(group)
    result = story.end()
    assert result.summary["staleness"]["rl"][2] == 1
    assert "has tokens of versions [1, 3], its ticket is version 3" in broken(result)["one_version"]


def test_F01_staleness_is_counted_through_a_resume_from_the_tokens_that_were_stored(story: Story) -> None:
    old = story.dispatch()
    story.finish(old)
    story.step()
    saved = story.checkpoint()
    story.step()
    story.resume(saved)
    story.step()
    story.train(old)
    result = story.end()
    assert result.ok, result.violations
    assert result.summary["staleness"]["rl"] == {0: 4, 2: 2}


def test_F03_a_version_that_is_made_again_after_a_resume_counts_once(story: Story) -> None:
    story.step()
    saved = story.checkpoint()
    story.step()
    story.step()
    story.resume(saved)
    story.step()
    result = story.end()
    assert result.ok, result.violations
    assert (result.summary["versions_published"], result.summary["batches"]) == (3, 2)


def test_F05_the_report_shows_when_long_answers_are_thrown_away(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for number in range(8):
        short, long = story.dispatch(), story.dispatch()
        story.finish(short, tokens=1)
        story.finish(long, tokens=10)
        story.train(short if number % 4 else long)
        left = long if number % 4 else short
        story.tell("group_dropped", group=left, trajectories=story.members(left), reason="too_slow")
    assert story.end().ok
    data = collect(tmp_path)
    assert data.generated_lengths == Counter({1: 16, 10: 16})
    assert data.trained_lengths == Counter({1: 12, 10: 4})
    assert distribution_gap(data.generated_lengths, data.trained_lengths) == 0.25
    panel = lengths(data)
    assert panel is not None
    assert "16 of 32 sampled answers were trained; the two distributions differ by at most 25.0%" in panel.caption


# ---------------------------------------------------------------- L05


def test_L05_evaluations_that_finish_together_are_two_records(tmp_path: Path) -> None:
    story = Story(tmp_path)
    with RecordLog(tmp_path / "evaluation.jsonl") as answers:
        for _ in range(4):
            story.step()
        story.tell("evaluation_started", version=4)
        story.step()
        story.tell("evaluation_started", version=5)
        for version in (5, 4):
            _evaluated(story, version)
            answers.write({"version": version, "mode": "greedy", "samples": []})
    assert story.end().ok
    found = {e.version: e.sampled_accuracy for e in read_events(tmp_path) if isinstance(e, EvaluationFinished)}
    assert found == {4: 0.4, 5: 0.5}
    assert sorted(record.version for record in read_evaluations(tmp_path)) == [4, 5]


def test_L05_an_evaluation_that_ends_at_another_version_is_convicted(story: Story) -> None:
    story.tell("evaluation_started", version=0)
    _evaluated(story, 0, version_end=1)
    assert broken(story.end())["evaluation"] == "evaluation of version 0 has answers of version 1"


def _evaluated(story: Story, version: int, *, version_end: int | None = None) -> None:
    story.tell(
        "evaluation_finished",
        version=version,
        version_end=version if version_end is None else version_end,
        greedy_accuracy=None,
        sampled_accuracy=version / 10,
        prompts=10,
        failed={},
        started=1.0,
        finished=2.0,
    )


# ---------------------------------------------------------------- I04, L07, D05


def test_I04_raw_rewards_are_on_record_also_when_nothing_is_trained(story: Story) -> None:
    story.finish(story.dispatch(), rewards=(0.0, 1.0))
    result = story.end("stopped")
    assert result.ok, result.violations
    assert result.summary["mean_reward"] == 0.5
    assert "mean reward of all 2 scored sampled trajectories: 0.5" in str(result)


def test_L07_the_staleness_histogram_sums_to_the_batches(tmp_path: Path) -> None:
    story = Story(tmp_path, batch_groups=3)
    for _ in range(4):
        groups = [story.dispatch() for _ in range(3)]
        for group in groups:
            story.finish(group)
        story.train(*groups)
    result = story.end()
    assert result.ok, result.violations
    assert sum(result.summary["staleness"]["rl"].values()) == 4 * 3 * MEMBERS


def test_L07_queue_sizes_idle_share_and_drops_are_shown_while_the_run_goes_on(story: Story) -> None:
    progress = Progress({})
    tell = story.tell
    story.tell = lambda kind, **fields: _shown(progress, tell(kind, **fields))  # type: ignore[method-assign]
    done, dropped, ready, _open = (story.dispatch() for _ in range(4))
    for group in (done, ready):
        story.finish(group)
    story.train(done)
    story.tell("group_dropped", group=dropped, trajectories=story.members(dropped), reason="ValueError")
    assert (progress.in_flight, progress.buffered) == (1, {ready})
    assert progress.dropped == {"ValueError": 1}
    assert progress.idle_share == 0.25
    story.end("stopped")


def _shown(progress: Progress, event: dict[str, Any]) -> dict[str, Any]:
    progress.event(event)
    return event


@pytest.mark.parametrize(("threshold", "fires"), [(0.01, True), (0.012, False), (0.02, False)])
def test_D05_the_mismatch_alarm_fires_above_its_threshold(
    threshold: float, fires: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    manager = ObserverManager()
    manager.register(Console(Console.Settings(mismatch_alarm=threshold)), name="console")
    manager.run_opened("runs/a", {})
    manager.metrics({"version": 3, "mismatch/abs_logprob_diff_mean": 0.012})
    manager.run_closed("completed", {})
    assert ("differ by 0.012 nats per token" in capsys.readouterr().out) == fires
    assert not manager.disabled


# ---------------------------------------------------------------- G06, K01


@pytest.mark.parametrize("loaded", [True, False])
def test_G06_an_instance_that_was_started_again_serves_only_what_it_has_loaded(loaded: bool, story: Story) -> None:
    story.step()
    story.tell("node_stopped", node=INSTANCE, reason="was killed by signal 9")
    story.tell("node_started", node=INSTANCE, role="rollout", pid=2)
    if loaded:
        story.commit()
    story.step()
    result = story.end()
    assert result.summary["lost_nodes"] == {INSTANCE: 1}
    assert result.ok == loaded
    assert loaded or "before the instance committed it" in broken(result)["weights"]


def test_K01_what_was_in_flight_begins_anew_and_what_was_stored_is_trained_once(story: Story) -> None:
    stored, flying = story.dispatch(), story.dispatch()
    story.finish(stored)
    saved = story.checkpoint()
    story.finish(flying)
    story.train(stored)
    story.resume(saved, flying)
    story.dispatch(flying)
    story.finish(flying)
    story.train(stored)
    story.train(flying)
    result = story.end()
    assert result.ok, result.violations
    assert (result.summary["dispatched"], result.summary["trained"]) == (4, 4)


def test_K01_a_group_in_flight_that_a_resume_skips_is_convicted(story: Story) -> None:
    skipped = story.dispatch()
    story.resume(story.checkpoint())
    assert f"groups [{skipped}] are neither stored" in broken(story.end("stopped"))["resume"]


def test_K01_a_group_that_was_trained_and_begins_anew_is_convicted(story: Story) -> None:
    story.step()
    story.resume(story.checkpoint(), 0)
    assert "group 0 is to begin anew, but it was not live" in broken(story.end("stopped"))["resume"]
