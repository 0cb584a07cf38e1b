"""The report of a run that lost nodes and was resumed: what was lost is told, what became void is left out."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.epochs import void_events
from headrace.observe.lines import RecordLog
from headrace.observe.report import write_report
from headrace.observe.report_data import RunData, collect
from headrace.observe.report_sections import mishaps_section
from headrace.observe.report_timeline import fleet_size, timeline


@pytest.fixture
def run(mishaps: Any, tmp_path: Path) -> Path:
    return Path(mishaps.write(tmp_path / "run"))


@pytest.fixture
def data(run: Path) -> RunData:
    return collect(run)


def test_each_batch_in_force_is_drawn_once(data: RunData) -> None:
    assert [version for version, _ in data.trained] == list(range(15))
    assert [record.version for record in data.metrics] == list(range(15))
    assert data.trained_lengths.total() == 12 * 16
    versions = [evaluation.version for evaluation in data.evaluations]
    assert Counter((s.version, s.mode) for s in data.samples) == Counter(
        (version, mode) for version in versions for mode in ("greedy", "sampled")
    )


def test_of_a_batch_that_was_trained_again_the_later_record_counts(mishaps: Any, data: RunData) -> None:
    later = {(r["phase"], r["step"]): r["time"] for r in mishaps.metrics}
    assert len(later) < len(mishaps.metrics)
    assert {(r.phase, r.step): r.time for r in data.metrics} == later


def test_records_of_what_was_not_made_again_are_left_out(mishaps: Any, tmp_path: Path) -> None:
    resumed = [e for e in mishaps.events if e["kind"] == "resumed"][1]
    with RecordLog(tmp_path / "events.jsonl") as log:
        for event in mishaps.events[: resumed["seq"] + 1]:
            log.write(event)
    for name, records in (("metrics", mishaps.metrics), ("evaluation", mishaps.evaluations)):
        with RecordLog(tmp_path / f"{name}.jsonl") as log:
            for record in records:
                log.write(record)
    data = collect(tmp_path)
    assert max(record.version for record in data.metrics) == resumed["version"] - 1
    assert {s.version for s in data.samples} == {evaluation.version for evaluation in data.evaluations}


def test_lost_nodes_are_told_with_what_became_of_the_work(mishaps: Any, data: RunData, run: Path) -> None:
    standing = [e for e in mishaps.events if e["seq"] not in void_events(run)]
    failed = sum(e["kind"] == "trajectory_failed" for e in standing)
    dropped = sum(len(e["trajectories"]) for e in standing if e.get("reason") == "storage_lost" and "group" in e)
    assert [(lost.node, lost.again, lost.dropped) for lost in data.lost_nodes] == [
        ("rollout-1", Counter(instance_lost=failed), Counter()),
        ("storage-0", Counter(), Counter(storage_lost=dropped)),
    ]
    text = mishaps_section(data)
    assert "<td>rollout-1</td><td>was killed by signal 9</td>" in text
    assert f"<td>{failed} trajectories made again (instance_lost)</td>" in text
    assert f"<td>{dropped} trajectories dropped (storage_lost)</td>" in text


def test_resumes_in_force_are_told_with_why_they_were_needed(mishaps: Any, data: RunData) -> None:
    _, second, third = (e for e in mishaps.events if e["kind"] == "resumed")
    assert [(r.version, r.void_events, r.reason) for r in data.resumes] == [
        (second["version"], second["seq"] - second["events"], "node trainer (pid 200) was killed by signal 9"),
        (third["version"], third["seq"] - third["events"], ""),
    ]
    text = mishaps_section(data)
    assert f"<td>resumed from version {third['version']}; {data.resumes[1].void_events} events are void</td>" in text
    assert "<td>ended without saying why</td>" in text


def test_the_section_is_in_the_order_of_time_and_in_the_page(
    data: RunData, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.observe.report._plotly_js", lambda: "")
    text = mishaps_section(data)
    assert text.index("rollout-1") < text.index("resumed from") < text.index("storage-0")
    assert text in write_report(run).read_text(encoding="utf-8")


def test_a_run_without_a_mishap_has_no_such_section(run_dir: Path) -> None:
    assert mishaps_section(collect(run_dir)) == ""


def test_a_node_that_never_came_back_is_told(simulate: Any, tmp_path: Path) -> None:
    story = simulate(steps=2)
    lost = {**story.events[1], "kind": "node_stopped", "node": "trainer", "reason": "ended with status 1"}
    story.events[-1:] = [lost, {**story.events[-1], "status": "failed"}]
    assert "ended with status 1</td><td>never started again" in mishaps_section(collect(story.write(tmp_path)))


def test_a_lost_scoring_process_was_replaced_and_no_drop_is_its_fault(simulate: Any, tmp_path: Path) -> None:
    story = simulate(steps=2)
    reason = "gave no score in time"
    drop = next(i for i, e in enumerate(story.events) if e["kind"] == "group_dropped")
    lost = {**story.events[1], "kind": "node_stopped", "node": "environment-0/scoring", "reason": reason}
    story.events.insert(drop, lost)
    data = collect(story.write(tmp_path))
    assert [loss.dropped for loss in data.lost_nodes] == [Counter()]
    assert f"<td>environment-0/scoring</td><td>{reason}</td><td>replaced</td>" in mishaps_section(data)


def test_the_chart_marks_lost_nodes_on_their_rows_and_shades_what_is_void(data: RunData) -> None:
    panel = timeline(data)
    assert panel is not None
    axis = panel.figure["layout"]["yaxis"]
    rows = dict(zip(axis["ticktext"], axis["tickvals"], strict=True))
    (marks,) = [trace for trace in panel.figure["data"] if trace.get("name") == "node lost"]
    assert marks["y"] == [rows["rollout-1"], 0.0]
    assert marks["hovertext"] == ["rollout-1 was killed by signal 9", "storage-0 was killed by signal 9"]
    shades = [shape for shape in panel.figure["layout"]["shapes"] if shape["type"] == "rect"]
    lines = [shape["x0"] for shape in panel.figure["layout"]["shapes"] if shape["type"] == "line"]
    assert lines == [shade["x1"] for shade in shades] == [data.since_start(r.at) for r in data.resumes]
    drawn = [span for spans in data.generated.values() for span in spans]
    assert not any(shade["x0"] < span.stop < shade["x1"] for span in drawn for shade in shades)


def test_the_number_of_instances_is_drawn_when_some_joined_or_left(data: RunData) -> None:
    assert data.instances == ["rollout-0", "rollout-1", "rollout-9"]
    counts = [count for _, count in data.fleet]
    assert max(counts) == 3
    assert counts[:3] == [1, 2, 1], "rollout-1 was lost"
    panel = fleet_size(data)
    assert panel is not None
    assert panel.figure["data"][0]["y"] == counts


def test_a_run_that_kept_its_instances_has_no_such_figure(run_dir: Path) -> None:
    assert fleet_size(collect(run_dir)) is None
