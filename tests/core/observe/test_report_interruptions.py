"""The report of a run whose trajectories are interrupted."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.report import write_report
from headrace.observe.report_data import collect

Events = list[dict[str, Any]]


@pytest.fixture
def run_dir(interrupted: Events, tmp_path: Path) -> Path:
    """A run in which something happens every second."""
    events: Events = json.loads(json.dumps(interrupted))
    began: dict[int, float] = {}
    for event in events:
        event["time"] = 100.0 + event["seq"]
        if event["kind"] == "trajectory_started":
            began[event["trajectory"]] = event["time"]
        if event["kind"] == "trajectory_finished":
            event |= {"started": began[event["trajectory"]], "finished": event["time"]}
    (tmp_path / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return tmp_path


def test_the_first_lines_say_that_c1_is_given_up_and_for_how_many_rows(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.observe.report._plotly_js", lambda: "")
    head = write_report(run_dir).read_text(encoding="utf-8").partition("<h2>")[0]
    assert "Audit passed without C1" in head
    assert "interrupts trajectories; they are not of a single policy (C1 is given up)" in head
    assert "trained, of several versions" in head


def test_an_instance_is_drawn_with_each_version_for_as_long_as_it_sampled_with_it(run_dir: Path) -> None:
    events = [json.loads(line) for line in (run_dir / "events.jsonl").read_text().splitlines()]
    generated = collect(run_dir).generated
    finished = {event["trajectory"]: event for event in events if event["kind"] == "trajectory_finished"}
    told = [(e, t) for e in events if e["kind"] == "instance_switched" for t, _, _ in e["interrupted"] if t in finished]
    in_time = [(switch, t) for switch, t in told if finished[t]["started"] < switch["time"] < finished[t]["finished"]]
    assert len(in_time) > 3
    for switch, t in in_time:
        at, instance = switch["time"] - 100.0, switch["instance"]
        began, ended = (finished[t][when] - 100.0 for when in ("started", "finished"))
        older = [
            span
            for (name, v), all_of in generated.items()
            if name == instance and v < switch["version"]
            for span in all_of
        ]
        newer = [
            span
            for (name, v), all_of in generated.items()
            if name == instance and v >= switch["version"]
            for span in all_of
        ]
        assert any(span.start <= max(began, span.start) < at <= span.stop for span in older)
        assert any(span.start <= at < span.stop for span in newer)
        assert any(span.stop >= ended for span in newer)
