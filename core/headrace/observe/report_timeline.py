"""The Gantt chart: who did what when, coloured by policy version."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.observe.report_data import Interval, RunData
from headrace.observe.report_figures import Figure, Panel, axis, border, time_unit
from headrace.observe.report_mishaps import Resume

MAX_INSTANCES = 32
"""Rows of the chart; of a larger fleet the first so many are drawn."""

Bar = tuple[int, Interval]
"""A version and when it was at work."""


def timeline(data: RunData) -> Panel | None:
    """Rollout instances and the trainer over time. An instance that serves several versions at once has a lane for
    each that overlaps."""
    if not data.trained and not data.generated:
        return None
    unit, scale = time_unit(data.seconds)
    instances = [name for name in data.instances if any(key[0] == name for key in data.generated)]
    drawn = instances[:MAX_INSTANCES]
    rows = [("trainer", [data.trained])]
    for name in reversed(drawn):
        bars = [(v, span) for (instance, v), spans in data.generated.items() if instance == name for span in spans]
        rows.append((name, lanes(bars)))
    figure = _draw(data, rows, unit, scale)
    left_out = f" {len(instances) - len(drawn)} more instances are not drawn." if len(instances) > len(drawn) else ""
    void = " Shaded: what a resume made void." if data.resumes else ""
    caption = (
        "Colour is the policy version: the one an instance samples with, and the one the trainer works on. "
        f"Drag to zoom, double-click to go back.{void}{left_out}"
    )
    return Panel(title="Who worked when, on which version", caption=caption, figure=figure, wide=True)


def fleet_size(data: RunData) -> Panel | None:
    """How many rollout instances there were; nothing for a run that kept those it began with."""
    if not data.scaled:
        return None
    unit, scale = time_unit(data.seconds)
    steps: Figure = {
        "type": "scatter",
        "mode": "lines",
        "x": [at / scale for at, _ in data.fleet],
        "y": [count for _, count in data.fleet],
        "line": {"shape": "hv", "width": 2, "color": "@blue"},
    }
    layout = {"xaxis": axis(unit), "yaxis": axis("instances", rangemode="tozero", dtick=1), "showlegend": False}
    caption = "Processes of rollout instances: those that joined and left, and those that were lost and started again."
    return Panel(title="Rollout instances", caption=caption, figure={"data": [steps], "layout": layout})


def lanes(bars: Sequence[Bar]) -> list[list[Bar]]:
    """Spread overlapping bars over as few lanes as needed: each goes to the first lane that is free."""
    spread: list[list[Bar]] = []
    for bar in sorted(bars, key=lambda b: b[1].start):
        for lane in spread:
            if lane[-1][1].stop <= bar[1].start:
                lane.append(bar)
                break
        else:
            spread.append([bar])
    return spread


def _draw(data: RunData, rows: Sequence[tuple[str, list[list[Bar]]]], unit: str, scale: float) -> Figure:
    newest = max((version for version, _ in data.published), default=0)
    traces: list[Figure] = [_scale(newest)]
    ticks: list[float] = []
    height = 0.0
    for name, row in rows:
        start = height
        for lane in row:
            traces.append(_lane(name, lane, height + 0.5, scale, newest))
            height += 1
        ticks.append((start + height) / 2)
        height += 0.7
    traces += _events(data, scale, height)
    if data.lost_nodes:
        traces.append(_losses(data, dict(zip((name for name, _ in rows), ticks, strict=True)), scale))
    layout = {
        "barmode": "overlay",
        "height": 130 + 26 * round(height),
        "xaxis": axis(unit, range=[0, data.seconds / scale]),
        "yaxis": {
            "tickvals": [*ticks, height + 0.3],
            "ticktext": [*(name for name, _ in rows), "evaluation"],
            "range": [-0.2, height + 0.9],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
            "fixedrange": True,
        },
        "showlegend": True,
        "shapes": [shape for resume in data.resumes for shape in _void(data, resume, scale)],
    }
    return {"data": traces, "layout": layout}


def _lane(name: str, lane: Sequence[Bar], y: float, scale: float, newest: int) -> Figure:
    what = "trained at" if name == "trainer" else "sampled with"
    return {
        "type": "bar",
        "orientation": "h",
        "base": [span.start / scale for _, span in lane],
        "x": [(span.stop - span.start) / scale for _, span in lane],
        "y": [y] * len(lane),
        "width": 0.86,
        "marker": {"color": [f"@versions:{version / max(1, newest):.4f}" for version, _ in lane], "line": {"width": 0}},
        "hovertext": [
            f"{name}: {what} version {version}<br>{span.start:.1f} to {span.stop:.1f} s"
            + (f", {span.size} trajectories" if name != "trainer" else "")
            for version, span in lane
        ],
        "hoverinfo": "text",
        "showlegend": False,
    }


def _scale(newest: int) -> Figure:
    """Draws nothing but the colour bar: Plotly cannot colour bars by number without complaints on the console."""
    title = {"text": "policy version", "side": "right", "font": {"size": 12, "color": "@muted"}}
    marker = {
        "color": [0],
        "colorscale": "@versions",
        "cmin": 0,
        "cmax": max(1, newest),
        "showscale": True,
        "colorbar": {"title": title, "thickness": 10, "outlinewidth": 0},
    }
    return {"type": "scatter", "mode": "markers", "x": [None], "y": [None], "marker": marker, "showlegend": False}


def _events(data: RunData, scale: float, top: float) -> list[Figure]:
    evaluations = [(e.version, data.since_start(e.started), data.since_start(e.finished)) for e in data.evaluations]
    return [
        {
            "type": "bar",
            "orientation": "h",
            "name": "evaluation",
            "base": [start / scale for _, start, _ in evaluations],
            "x": [(stop - start) / scale for _, start, stop in evaluations],
            "y": [top + 0.3] * len(evaluations),
            "width": 0.5,
            "marker": {"color": "@muted"},
            "hovertext": [f"evaluation of version {version}" for version, _, _ in evaluations],
            "hoverinfo": "text",
            "showlegend": False,
        },
        {
            "type": "scatter",
            "mode": "markers",
            "name": "version published",
            "x": [at / scale for _, at in data.published],
            "y": [0.0] * len(data.published),
            "marker": {"symbol": "line-ns", "size": 7, "line": {"width": 1, "color": "@muted"}},
            "hovertext": [f"version {version} published" for version, _ in data.published],
            "hoverinfo": "text",
        },
    ]


def _losses(data: RunData, places: Mapping[str, float], scale: float) -> Figure:
    """A cross on the row of the node; below all rows for one that has none."""
    return {
        "type": "scatter",
        "mode": "markers",
        "name": "node lost",
        "x": [data.since_start(lost.at) / scale for lost in data.lost_nodes],
        "y": [places.get(lost.node, 0.0) for lost in data.lost_nodes],
        "marker": {"symbol": "x", "size": 9, "color": "@orange"},
        "hovertext": [f"{lost.node} {lost.reason}" for lost in data.lost_nodes],
        "hoverinfo": "text",
    }


def _void(data: RunData, resume: Resume, scale: float) -> list[Figure]:
    since, at = data.since_start(resume.since) / scale, data.since_start(resume.at) / scale
    across = {"yref": "paper", "y0": 0, "y1": 1}
    shade = {"type": "rect", "x0": since, "x1": at, **across, "fillcolor": "@muted", "opacity": 0.15}
    return [{**shade, "line": {"width": 0}}, border(at)]
