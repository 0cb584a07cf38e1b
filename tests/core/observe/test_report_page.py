"""The report: one page that needs nothing else, whose every plot is one that Plotly accepts."""

from __future__ import annotations

import errno
import itertools
import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import PluginError, RunError
from headrace.observe.report import write_report
from headrace.observe.report_data import Interval, collect, merge
from headrace.observe.report_figures import (
    MAX_POINTS,
    Line,
    distribution_gap,
    learning,
    lengths,
    line_figure,
    running_mean,
    speed,
    staleness,
    thinned,
    time_unit,
    training,
)
from headrace.observe.report_sections import duration
from headrace.observe.report_timeline import lanes, timeline

NAN = float("nan")


@pytest.fixture
def no_plotly_js(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page without Plotly's five megabytes."""
    monkeypatch.setattr("headrace.observe.report._plotly_js", lambda: "/* plotly */")


@pytest.fixture
def page(run_dir: Path, no_plotly_js: None) -> str:
    return write_report(run_dir).read_text(encoding="utf-8")


def figures_of(page: str) -> dict[str, Any]:
    found = re.search(r"^const figures = (.*);$", page, re.MULTILINE)
    assert found is not None
    return dict(json.loads(found[1].replace("<\\/", "</")))


# ---------------------------------------------------------------- the page


def test_the_page_holds_plotly_once_and_asks_for_nothing_from_outside(run_dir: Path) -> None:
    pytest.importorskip("plotly")
    path = write_report(run_dir)
    assert path == run_dir / "report.html"
    page = path.read_text(encoding="utf-8")
    assert page.count("* plotly.js v") == 1
    assert not re.search(r"<(script|img|iframe)[^>]+src=|<link|@import|url\(", page.replace(_plotly(), ""))


def _plotly() -> str:
    from plotly.offline import get_plotlyjs

    return str(get_plotlyjs())


def test_every_plot_has_a_place_a_title_and_a_caption(page: str) -> None:
    figures = figures_of(page)
    assert list(figures) == re.findall(r'<div class="plot" id="(plot-\d+)"', page)
    assert len(re.findall(r"<figure[^>]*><h3>[^<]+</h3><figcaption>[^<]+</figcaption>", page)) == len(figures)
    for title in (
        "Held-out accuracy over versions",
        "Held-out accuracy over time",
        "Training reward over versions",
        "Training reward over time",
        "Who worked when, on which version",
        "Staleness of trained rows",
        "Response length",
        "Throughput",
        "Trainer idle share",
        "Mismatch of trainer and rollout",
        "Loss",
        "Gradient norm",
    ):
        assert f"<h3>{title}</h3>" in page


@pytest.mark.parametrize("story", ["simulation", "mishaps"])
def test_every_plot_is_valid_plotly_and_every_axis_has_a_title(
    story: str, request: pytest.FixtureRequest, tmp_path: Path, no_plotly_js: None
) -> None:
    page = write_report(request.getfixturevalue(story).write(tmp_path / "run")).read_text(encoding="utf-8")
    graph_objects = pytest.importorskip("plotly.graph_objects")
    script = (Path(__file__).parents[3] / "core/headrace/observe/page/report.js").read_text()
    named = set(re.findall(r"(\w+): (?:\"#|\[\[)", script))

    def painted(value: Any) -> Any:
        if isinstance(value, str) and value.startswith("@"):
            assert value[1:].split(":")[0] in named, value
            return "Viridis" if value == "@versions" else "#123456"
        if isinstance(value, dict):
            return {key: painted(item) for key, item in value.items()}
        return [painted(item) for item in value] if isinstance(value, list) else value

    for place, figure in figures_of(page).items():
        graph_objects.Figure(**painted(figure))
        assert figure["layout"]["xaxis"]["title"]["text"], place
        assert "ticktext" in figure["layout"]["yaxis"] or figure["layout"]["yaxis"]["title"]["text"], place


def test_the_page_tells_the_verdict_the_books_the_job_and_the_answers(page: str, simulation: Any) -> None:
    assert "✓ Audit passed: 19 rules over" in page
    assert "<td>dropped: run_ended</td>" in page
    assert "<dt>max_new_tokens</dt><dd>36</dd>" in page
    last = max(r["version"] for r in simulation.evaluations)
    assert f"<th>version 3</th><th>version {last}</th>" in page
    assert '<td class="answer">sort gfeh =</td>' in page


def test_the_page_tells_how_often_requests_were_parked(run_dir: Path, no_plotly_js: None) -> None:
    assert "parked in host memory" not in write_report(run_dir).read_text(encoding="utf-8")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    for record in records[:2]:
        record["rollout/parked"] = 3
    (run_dir / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    assert "parked in host memory</dt>" in write_report(run_dir).read_text(encoding="utf-8")


def test_the_page_tells_how_much_of_a_version_instances_fetch(
    simulate: Any, tmp_path: Path, no_plotly_js: None
) -> None:
    run = simulate(steps=4)
    loads = [event for event in run.events if event["kind"] == "instance_version"]

    def tile(*nbytes: int) -> str:
        for event, fetched in zip(loads, itertools.chain(nbytes, itertools.repeat(nbytes[-1])), strict=False):
            event["nbytes"] = fetched
        folder = run.write(tmp_path / f"run-{nbytes[-1]}")
        page = write_report(folder).read_text(encoding="utf-8")
        return page.partition("<dt>weights per version</dt><dd>")[2].partition("</dd>")[0]

    assert tile(1_742_000) == "1.7 MB"
    assert tile(1_742_000, 31_000) == "0.031 MB <small>of 1.7 MB, the base once</small>"
    assert tile(0) == ""


def test_a_failed_audit_is_told_in_the_first_line(simulate: Any, tmp_path: Path, no_plotly_js: None) -> None:
    run = simulate(steps=2)
    next(e for e in run.events if e["kind"] == "instance_version")["digest"] = "beef"
    page = write_report(run.write(tmp_path / "run")).read_text(encoding="utf-8")
    assert "✗ Audit failed: 1 violation of 1 rules" in page
    assert "with digest beef" in page


def test_a_log_without_its_end_is_not_shown_as_a_pass(simulate: Any, tmp_path: Path, no_plotly_js: None) -> None:
    run = simulate(steps=2)
    del run.events[-1]
    page = write_report(run.write(tmp_path / "run")).read_text(encoding="utf-8")
    assert "✓ Audit passed so far: 19 rules over" in page
    assert "not finished" in page


def test_what_a_run_says_cannot_become_markup(simulate: Any, tmp_path: Path, no_plotly_js: None) -> None:
    run = simulate(steps=2)
    evil = "</script><script>alert(1)</script>"
    run.events[0]["job"] = evil
    for record in run.evaluations:
        record["samples"][0] |= {"prompt": evil, "answer": evil}
    for event in run.events:
        if event["kind"] == "phase_started":
            event["phase"] += evil
    page = write_report(run.write(tmp_path / "run")).read_text(encoding="utf-8")
    assert "alert(1)" in page
    assert evil not in page


def test_a_run_that_has_only_an_event_log_still_has_a_report(run_dir: Path, no_plotly_js: None) -> None:
    for name in ("metrics.jsonl", "evaluation.jsonl", "job.json"):
        (run_dir / name).unlink()
    page = write_report(run_dir).read_text(encoding="utf-8")
    assert "<h3>Staleness of trained rows</h3>" in page
    for absent in ("Before and after", "How training went", "Job, as resolved", "Training reward over versions"):
        assert absent not in page


def test_a_run_that_was_killed_before_its_first_batch_has_a_report(
    simulate: Any, tmp_path: Path, no_plotly_js: None
) -> None:
    run = simulate(steps=1)
    run.events, run.metrics, run.evaluations = run.events[:6], [], []
    page = write_report(run.write(tmp_path / "run")).read_text(encoding="utf-8")
    assert "not finished" in page


def test_a_directory_without_a_log_is_refused(tmp_path: Path, no_plotly_js: None) -> None:
    with pytest.raises(RunError, match="no event log at"):
        write_report(tmp_path)


def test_a_damaged_job_file_is_an_error_that_names_it(run_dir: Path, no_plotly_js: None) -> None:
    (run_dir / "job.json").write_text("{")
    with pytest.raises(RunError, match=r"job.json does not read as a job"):
        write_report(run_dir)


def test_without_plotly_the_error_says_what_to_install(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(PluginError, match="plotly, which is not installed") as caught:
        write_report(run_dir)
    assert caught.value.fix == 'pip install "headrace[report]"'


def test_a_page_that_cannot_be_written_is_an_error_with_a_fix(run_dir: Path, no_plotly_js: None) -> None:
    (run_dir / "report.html").mkdir()
    with pytest.raises(RunError, match=r"cannot write .*report.html") as caught:
        write_report(run_dir)
    assert caught.value.fix


def test_a_page_that_the_disk_cuts_leaves_the_last_whole_one_and_nothing_else(
    run_dir: Path, page: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, text: str, **_: Any) -> None:
        path.write_bytes(text[:1000].encode())
        raise OSError(errno.ENOSPC, "No space left on device")

    files = set(run_dir.iterdir())
    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(RunError, match="No space left on device"):
        write_report(run_dir)
    assert (run_dir / "report.html").read_text(encoding="utf-8") == page
    assert set(run_dir.iterdir()) == files


# ---------------------------------------------------------------- what plots are drawn from


def test_the_reward_is_drawn_as_the_metrics_have_it(simulation: Any, run_dir: Path) -> None:
    panel = next(p for p in learning(collect(run_dir)) if p.title == "Training reward over versions")
    expected = {r["version"]: r["reward/mean"] for r in simulation.metrics if "reward/mean" in r}
    faint = panel.figure["data"][0]
    assert dict(zip(faint["x"], faint["y"], strict=True)) == expected


def test_accuracies_are_drawn_by_the_version_asked_for(simulation: Any, run_dir: Path) -> None:
    panel = next(p for p in learning(collect(run_dir)) if p.title == "Held-out accuracy over versions")
    expected = {e["version"]: e["sampled_accuracy"] for e in simulation.events if e["kind"] == "evaluation_finished"}
    sampled = next(trace for trace in panel.figure["data"] if trace["name"] == "sampled")
    assert dict(zip(sampled["x"], sampled["y"], strict=True)) == expected


def test_the_shares_of_the_staleness_histogram_sum_to_one() -> None:
    panel = staleness({"warm-up": {0: 40}, "reinforce": {0: 1, 2: 3}}, {"warm-up": 0, "reinforce": 2})
    assert panel is not None
    (bars,) = panel.figure["data"]
    assert (bars["x"], bars["y"]) == ([0, 1, 2], [0.25, 0.0, 0.75])


def test_staleness_outside_its_bound_is_drawn_too() -> None:
    panel = staleness({"reinforce": {-1: 1, 3: 1}}, {"reinforce": 2})
    assert panel is not None
    assert panel.figure["data"][0]["x"] == [-1, 0, 1, 2, 3]


def test_generated_and_trained_lengths_are_counted_apart(simulation: Any, run_dir: Path) -> None:
    data = collect(run_dir)
    sampled = {e["trajectory"]: e["response_tokens"] for e in simulation.events if e.get("spans")}
    trained = {r for e in simulation.events if e["kind"] == "batch_trained" for r in e["rows"]}
    assert data.generated_lengths == Counter(sampled.values())
    assert data.trained_lengths == Counter(tokens for t, tokens in sampled.items() if t in trained)
    assert data.trained_lengths.total() == 12 * 16
    panel = lengths(data)
    assert panel is not None
    assert f"192 of {len(sampled)} sampled answers were trained" in panel.caption


def test_the_gap_of_two_length_distributions_is_the_largest_difference_of_their_sums() -> None:
    assert distribution_gap(Counter({1: 1, 2: 1}), Counter({1: 2, 2: 2})) == 0
    assert distribution_gap(Counter({1: 1, 10: 1}), Counter({1: 1})) == 0.5
    assert distribution_gap(Counter({1: 1}), Counter()) == 0


def test_instances_are_drawn_with_the_versions_they_sampled_with(simulation: Any, run_dir: Path) -> None:
    data = collect(run_dir)
    pairs = [(e["instance"], e["spans"][0][0]) for e in simulation.events if e.get("spans")]
    pairs += [(e["source"], e["version"]) for e in simulation.events if e["kind"] == "trajectory_moved"]
    assert data.generated.keys() == set(pairs)
    for pair, spans in data.generated.items():
        assert sum(span.size for span in spans) == pairs.count(pair)
    panel = timeline(data)
    assert panel is not None
    assert panel.figure["layout"]["yaxis"]["ticktext"] == ["trainer", "rollout-1", "rollout-0", "evaluation"]


def test_idle_share_is_waiting_over_waiting_and_training(simulation: Any, run_dir: Path) -> None:
    data = collect(run_dir)
    batches = [e for e in simulation.events if e["kind"] == "batch_trained"]
    waited = sum(e["wait_seconds"] for e in batches)
    assert data.idle_share == pytest.approx(waited / (waited + sum(e["finished"] - e["started"] for e in batches)))


@pytest.mark.parametrize("draw", [learning, speed, training], ids=lambda f: f.__name__)
def test_a_phase_border_is_drawn_where_the_plot_has_both_phases(draw: Callable[..., Any], run_dir: Path) -> None:
    for panel in draw(collect(run_dir)):
        names = [a["text"] for a in panel.figure["layout"].get("annotations", ())]
        assert names in ([], ["warm-up", "reinforce"])
        assert (panel.title == "Loss") <= bool(names)


# ---------------------------------------------------------------- helpers


def test_overlapping_intervals_become_one_and_near_ones_within_the_gap() -> None:
    spans = [Interval(5.0, 6.0), Interval(0.0, 1.0), Interval(0.5, 2.0), Interval(2.05, 3.0)]
    assert merge(spans, gap=0.0) == [Interval(0.0, 2.0, 2), Interval(2.05, 3.0), Interval(5.0, 6.0)]
    assert merge(spans, gap=0.1) == [Interval(0.0, 3.0, 3), Interval(5.0, 6.0)]


def test_overlapping_bars_go_to_different_lanes_and_no_more_than_needed() -> None:
    a, b, c = (1, Interval(0.0, 2.0)), (2, Interval(1.0, 3.0)), (3, Interval(2.0, 4.0))
    assert lanes([c, b, a]) == [[a, c], [b]]


def test_long_series_are_thinned_to_means_and_gaps_stay() -> None:
    count = 2 * MAX_POINTS
    xs, ys = thinned(list(range(count)), [float(i) for i in range(count)])
    assert len(xs) == MAX_POINTS
    assert (xs[0], ys[0]) == (0.5, 0.5)
    assert thinned([0, 1], [NAN, 2.0])[1] == [None, 2.0]


def test_a_running_mean_does_not_cross_a_phase_border() -> None:
    x = list(range(120))
    line = Line(name="a", x=x, y=[0.0] * 60 + [1.0] * 60, colour="blue", smooth=True)
    figure = line_figure([line], x="version", y="a", borders={0: "one", 60: "two"})
    mean = figure["data"][1]
    assert set(mean["y"]) == {0.0, None, 1.0}
    assert len(mean["x"]) == len(mean["y"]) == 121


def test_a_running_mean_is_centred_and_skips_gaps() -> None:
    values: list[float | None] = [float(i) for i in range(60)]
    means = running_mean(values)
    assert means[30] == 30.0
    values[30] = None
    assert running_mean(values)[30] is None
    assert running_mean(values)[31] == pytest.approx((29 + 31 + 32 + 33) / 4)


@pytest.mark.parametrize(
    ("seconds", "unit"), [(599, "seconds"), (601, "minutes"), (4 * 3600 - 1, "minutes"), (4 * 3600, "hours")]
)
def test_the_time_axis_has_the_unit_that_suits_the_run(seconds: float, unit: str) -> None:
    assert time_unit(seconds)[0] == f"{unit} since start"


@pytest.mark.parametrize(("seconds", "text"), [(42.4, "42 s"), (185, "3 min 05 s"), (7800, "2 h 10 min")])
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
