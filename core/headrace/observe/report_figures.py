"""The plots of a report as plain Plotly figures.

Colours are names with a leading ``@`` (``@blue``, ``@versions:0.4``): the page replaces them by those of its theme, so
that every plot is right in light and dark alike. Every axis says what it shows and in which unit.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from headrace.observe.report_data import RunData

Figure = dict[str, Any]

MAX_POINTS = 1500
"""Per line; beyond, neighbours are averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A titled plot."""

    title: str
    caption: str
    figure: Figure
    wide: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """A named series. NaN values are gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    markers: bool = False
    smooth: bool = False
    """Draw the values faintly and their running mean over them."""


# ---------------------------------------------------------------- pieces


def axis(title: str, **options: Any) -> dict[str, Any]:
    """An axis with a title, which holds the unit."""
    return {"title": {"text": title, "standoff": 8}, "automargin": True, **options}


def time_unit(seconds: float) -> tuple[str, float]:
    """The unit that suits a run's length, and its seconds."""
    if seconds < 600:
        return "seconds since start", 1.0
    return ("minutes since start", 60.0) if seconds < 4 * 3600 else ("hours since start", 3600.0)


def thinned(x: Sequence[float], y: Sequence[float]) -> tuple[list[float], list[float | None]]:
    """At most MAX_POINTS points: means of neighbours. What is not a number becomes a gap."""
    size = max(1, math.ceil(len(x) / MAX_POINTS))
    xs, ys = [], []
    for i in range(0, len(x), size):
        finite = [v for v in y[i : i + size] if math.isfinite(v)]
        xs.append(sum(x[i : i + size]) / len(x[i : i + size]))
        ys.append(sum(finite) / len(finite) if finite else None)
    return xs, ys


def running_mean(values: Sequence[float | None]) -> list[float | None]:
    """Centred, over about a fifteenth of the values; gaps stay gaps."""
    half = len(values) // 30
    means: list[float | None] = []
    for i, value in enumerate(values):
        near = [v for v in values[max(0, i - half) : i + half + 1] if v is not None]
        means.append(None if value is None else sum(near) / len(near))
    return means


def traces(line: Line, borders: Iterable[float]) -> list[Figure]:
    """A line as Plotly draws it. One with a running mean is broken where a phase begins: no mean may span two."""
    x, y = thinned(line.x, line.y)
    stroke = {"color": f"@{line.colour}", "width": 2}
    plain: Figure = {"type": "scatter", "x": x, "y": y, "name": line.name, "line": stroke, "mode": "lines"}
    if line.markers:
        plain |= {"mode": "lines+markers", "marker": {"size": 6, "color": f"@{line.colour}"}}
    if not line.smooth:
        return [plain]
    means: list[float | None] = []
    starts = sorted({bisect_left(x, border) for border in borders} - {0, len(x)})
    for start, stop in reversed(list(pairwise([0, *starts, len(x)]))):
        means[:0] = running_mean(y[start:stop])
        if start:
            x.insert(start, x[start])
            y.insert(start, None)
            means.insert(0, None)
    faint = {**plain, "line": {**stroke, "width": 1}, "opacity": 0.35, "showlegend": False, "hoverinfo": "skip"}
    return [faint, {**plain, "y": means}]


def line_figure(lines: Sequence[Line], *, x: str, y: str, borders: Mapping[float, str], **y_options: Any) -> Figure:
    """Lines over a common axis; ``borders``: x → name of the phase that begins there."""
    layout: dict[str, Any] = {"xaxis": axis(x), "yaxis": axis(y, **y_options), "showlegend": len(lines) > 1}
    low, high = min(min(line.x) for line in lines), max(max(line.x) for line in lines)
    starts = sorted(borders)
    ends = [*starts[1:], math.inf][: len(starts)]
    shown = [at for at, end in zip(starts, ends, strict=True) if end > low and at <= high]
    if len(shown) > 1:
        layout["shapes"] = [border(at) for at in shown]
        layout["annotations"] = [_border_name(at, borders[at]) for at in shown]
    return {"data": [trace for line in lines for trace in traces(line, borders)], "layout": layout}


def border(at: float) -> Figure:
    """A vertical line across the plot."""
    stroke = {"color": "@muted", "width": 1, "dash": "dot"}
    return {"type": "line", "x0": at, "x1": at, "yref": "paper", "y0": 0, "y1": 1, "line": stroke}


def _border_name(at: float, name: str) -> Figure:
    place = {"x": at, "yref": "paper", "y": 1, "xanchor": "left", "yanchor": "bottom"}
    return {**place, "text": name, "showarrow": False, "font": {"size": 11, "color": "@muted"}}


# ---------------------------------------------------------------- what the lines are drawn from


class Series:
    """A run's metrics by version and by time."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        self.unit, self._scale = time_unit(data.seconds)

    def x(self, values: Sequence[Any], *, by_time: bool, time: Callable[[Any], float]) -> list[float]:
        """Version of each value, or its time (seconds since start, from ``time``) in the run's unit."""
        return [time(v) / self._scale if by_time else v.version for v in values]

    def borders(self, *, by_time: bool) -> dict[float, str]:
        """Where phases begin, when there are several."""
        phases = self._data.phases
        return dict(
            zip(
                self.x(phases, by_time=by_time, time=lambda p: self._data.since_start(p.time)),
                [phase.phase for phase in phases],
                strict=True,
            )
            if len(phases) > 1
            else ()
        )

    def metric(self, name: str, label: str, colour: str, *, by_time: bool = False, smooth: bool = True) -> Line | None:
        """One metric, or None where no batch has it."""
        records = [r for r in self._data.metrics if name in r.values]
        if not records:
            return None
        x = self.x(records, by_time=by_time, time=lambda r: self._data.since_start(r.time))
        return Line(name=label, x=x, y=[r.values[name] for r in records], colour=colour, smooth=smooth)

    def accuracy(self, mode: str, label: str, colour: str, *, by_time: bool) -> Line | None:
        """Held-out accuracy of a mode; an evaluation's time is its end."""
        found = [e for e in self._data.evaluations if getattr(e, f"{mode}_accuracy") is not None]
        if not found:
            return None
        found.sort(key=lambda e: e.version)
        x = self.x(found, by_time=by_time, time=lambda e: self._data.since_start(e.finished))
        y = [getattr(e, f"{mode}_accuracy") for e in found]
        return Line(name=label, x=x, y=y, colour=colour, markers=True)

    def figure(self, lines: Sequence[Line | None], *, y: str, by_time: bool = False, **options: Any) -> Figure | None:
        """The lines that exist over versions or time; None when there is none."""
        drawn = [line for line in lines if line is not None]
        if not drawn:
            return None
        x = self.unit if by_time else "policy version"
        return line_figure(drawn, x=x, y=y, borders=self.borders(by_time=by_time), **options)


# ---------------------------------------------------------------- panels


def learning(data: RunData) -> list[Panel]:
    """Reward and held-out accuracy, each over versions and over time."""
    series = Series(data)
    share: dict[str, Any] = {"range": [-0.02, 1.02], "tickformat": ".0%"}
    panels = []
    for by_time in (False, True):
        over = "time" if by_time else "versions"
        reward = series.figure(
            [series.metric("reward/mean", "mean", "blue", by_time=by_time)], y="reward", by_time=by_time
        )
        accuracy = series.figure(
            [
                series.accuracy("greedy", "greedy", "orange", by_time=by_time),
                series.accuracy("sampled", "sampled", "blue", by_time=by_time),
            ],
            y="right answers",
            by_time=by_time,
            **share,
        )
        panels.append(
            _panel(f"Training reward over {over}", "Mean over each training batch and its running mean.", reward)
        )
        panels.append(_panel(f"Held-out accuracy over {over}", "Tasks that are never trained on.", accuracy))
    ordered = [panels[1], panels[3], panels[0], panels[2]]
    return [panel for panel in ordered if panel is not None]


def staleness(histograms: Mapping[str, Mapping[int, int]], bounds: Mapping[str, int]) -> Panel | None:
    """Share of trained rows by staleness, of each phase that can have any."""
    drawn = {phase: counts for phase, counts in histograms.items() if bounds[phase] > 0} or histograms
    if not drawn:
        return None
    colours = ["blue", "orange", "green", "purple"]
    bars = []
    for index, (phase, counts) in enumerate(drawn.items()):
        steps = list(range(min(0, *counts), max(bounds[phase], *counts) + 1))
        total = sum(counts.values())
        shares = [counts.get(step, 0) / total for step in steps]
        bars.append(
            {
                "type": "bar",
                "x": steps,
                "y": shares,
                "name": phase,
                "marker": {"color": f"@{colours[index % len(colours)]}"},
                "text": [f"{share:.0%}" for share in shares],
                "textposition": "outside",
                "cliponaxis": False,
            }
        )
    layout = {
        "xaxis": axis("versions between sampling and training", dtick=1),
        "yaxis": axis("share of trained rows", tickformat=".0%", rangemode="tozero"),
        "showlegend": len(bars) > 1,
        "bargap": 0.35,
    }
    bound = ", ".join(f"{bounds[phase]} in {phase}" for phase in drawn)
    return Panel(
        title="Staleness of trained rows",
        caption=f"Recomputed from the spans that instances reported; max_staleness is {bound}.",
        figure={"data": bars, "layout": layout},
    )


def lengths(data: RunData) -> Panel | None:
    """Response lengths of everything sampled and of what was trained: equal unless long answers get lost."""
    if not data.generated_lengths:
        return None
    longest = max(data.generated_lengths)
    width = max(1, math.ceil(longest / 60))
    lines = []
    for counts, name, colour, dash in (
        (data.generated_lengths, "generated", "orange", "solid"),
        (data.trained_lengths, "trained", "blue", "dot"),
    ):
        edges, shares = _histogram(counts, width, longest)
        stroke = {"color": f"@{colour}", "width": 2, "dash": dash, "shape": "hvh"}
        lines.append({"type": "scatter", "mode": "lines", "x": edges, "y": shares, "name": name, "line": stroke})
    total = data.generated_lengths.total()
    gap = distribution_gap(data.generated_lengths, data.trained_lengths)
    caption = (
        f"{data.trained_lengths.total():,} of {total:,} sampled answers were trained; the two distributions differ by "
        f"at most {gap:.1%}. {data.truncated / total:.1%} of answers ran out of tokens."
    )
    layout = {
        "xaxis": axis("response tokens", rangemode="tozero"),
        "yaxis": axis("share of answers", tickformat=".1%", rangemode="tozero"),
    }
    return Panel(title="Response length", caption=caption, figure={"data": lines, "layout": layout})


def _histogram(counts: Counter[int], width: int, longest: int) -> tuple[list[float], list[float]]:
    total = counts.total() or 1
    bins = Counter[int]()
    for length, count in counts.items():
        bins[length // width] += count
    steps = range(longest // width + 1)
    return [(step + 0.5) * width - 0.5 for step in steps], [bins[step] / total for step in steps]


def distribution_gap(one: Counter[int], other: Counter[int]) -> float:
    """The largest difference of the two cumulative distributions (the Kolmogorov–Smirnov statistic)."""
    if not one or not other:
        return 0.0
    gap = below_one = below_other = 0.0
    for length in sorted(one.keys() | other.keys()):
        below_one += one[length] / one.total()
        below_other += other[length] / other.total()
        gap = max(gap, abs(below_one - below_other))
    return gap


def _panel(title: str, caption: str, figure: Figure | None) -> Panel | None:
    return None if figure is None else Panel(title=title, caption=caption, figure=figure)


def speed(data: RunData) -> list[Panel]:
    """How fast both sides were, and how long the trainer waited."""
    series = Series(data)
    tokens = series.figure(
        [
            series.metric("rollout/tokens_per_second", "generated", "orange"),
            series.metric("train/tokens_per_second", "trained, while training", "blue"),
        ],
        y="tokens per second",
        rangemode="tozero",
    )
    idle = Line(
        name="idle",
        x=[float(version) for version, _, _ in data.waits],
        y=[wait / (wait + busy) if wait + busy > 0 else math.nan for _, wait, busy in data.waits],
        colour="blue",
        smooth=True,
    )
    waiting = series.figure([idle if data.waits else None], y="idle share", range=[-0.02, 1.02], tickformat=".0%")
    panels = [
        _panel("Throughput", "Response tokens sampled by all instances; tokens the trainer learned from.", tokens),
        _panel("Trainer idle share", "Time spent waiting for a batch ÷ (waiting + training), per batch.", waiting),
    ]
    return [panel for panel in panels if panel is not None]


def training(data: RunData) -> list[Panel]:
    """The health of the optimisation."""
    series = Series(data)
    loss = series.figure([series.metric("train/loss", "loss", "blue")], y="loss")
    norm = series.figure(
        [series.metric("train/gradient_norm", "gradient norm", "blue")], y="gradient norm", rangemode="tozero"
    )
    mismatch = series.figure(
        [
            series.metric("mismatch/abs_logprob_diff_max", "max", "orange"),
            series.metric("mismatch/abs_logprob_diff_mean", "mean", "blue"),
        ],
        y="|Δ log-prob| (nats)",
        type="log",
        dtick=1,
        tickformat=".0e",
    )
    by_length = series.figure(
        [
            series.metric(f"mismatch/sequence_log_ratio_from_{least}", f"from {least} tokens", colour)
            for least, colour in ((1, "blue"), (16, "green"), (128, "orange"), (1024, "purple"))
        ],
        y="|Σ Δ log-prob| (nats)",
        type="log",
        dtick=1,
        tickformat=".0e",
    )
    entropy = series.figure(
        [series.metric("policy/entropy", "entropy", "blue")], y="entropy (nats)", rangemode="tozero"
    )
    share: dict[str, Any] = {"range": [-0.02, 1.02], "tickformat": ".0%"}
    groups = series.figure(
        [
            series.metric("groups/all_right_share", "all right", "green"),
            series.metric("groups/all_wrong_share", "all wrong", "orange"),
        ],
        y="share of groups",
        **share,
    )
    panels = [
        _panel("Mismatch of trainer and rollout", "Per token; contains the drift over the row's staleness.", mismatch),
        _panel("Mismatch of whole answers", "By length: what is added up over an answer's tokens.", by_length),
        _panel("Groups that teach nothing", "All members have the same reward, so no advantage.", groups),
        _panel("Loss", "Per training batch. A policy-gradient loss need not fall.", loss),
        _panel("Gradient norm", "Before clipping.", norm),
        _panel("Policy entropy", "Mean over sampled tokens.", entropy),
    ]
    return [panel for panel in panels if panel is not None]
