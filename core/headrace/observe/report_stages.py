"""How the stages that rows go through overlap: when each was at work, and how near the whole is to the slowest."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.observe.report_data import Interval, RunData, merge
from headrace.observe.report_figures import Figure, Panel, axis, time_unit

GENERATE, TRAIN = "generate", "train"


def stages(data: RunData) -> Panel | None:
    """None for a run without separate stages: there is nothing to overlap but generation and training, and the chart of
    instances shows these."""
    work = _work(data)
    if not data.staged or GENERATE not in work:
        return None
    makespan, busy = overlap(work)
    slowest = max(busy, key=lambda stage: busy[stage])
    caption = (
        f"From the first token to the last step {makespan:.1f} s passed. The slowest stage, {slowest}, was at work for "
        f"{busy[slowest]:.1f} s of these; one after the other the stages would have taken {sum(busy.values()):.1f} s."
    )
    return Panel(title="When each stage was at work", caption=caption, figure=_draw(data, work, busy), wide=True)


def overlap(work: Mapping[str, Sequence[Interval]]) -> tuple[float, dict[str, float]]:
    """Seconds from the first to the last work of any stage, and for how many each was at work. ``work``: disjoint
    intervals of each stage, ascending."""
    begin = min(spans[0].start for spans in work.values())
    end = max(spans[-1].stop for spans in work.values())
    return end - begin, {stage: sum(span.stop - span.start for span in spans) for stage, spans in work.items()}


def _work(data: RunData) -> dict[str, list[Interval]]:
    """Of the phases that roll out, in the order in which rows go through the stages."""
    generated = merge((span for spans in data.generated.values() for span in spans), gap=0.0)
    if not generated:
        return {}
    found = {GENERATE: generated, **data.staged, TRAIN: [span for _, span in data.trained]}
    begin = generated[0].start
    late = {stage: [s for s in merge(spans, gap=0.0) if s.start >= begin] for stage, spans in found.items()}
    return {stage: spans for stage, spans in late.items() if spans}


def _draw(data: RunData, work: Mapping[str, Sequence[Interval]], busy: Mapping[str, float]) -> Figure:
    unit, scale = time_unit(data.seconds)
    places = {stage: float(len(work) - place) for place, stage in enumerate(work)}
    return {
        "data": [
            {
                "type": "bar",
                "orientation": "h",
                "base": [span.start / scale for span in spans],
                "x": [(span.stop - span.start) / scale for span in spans],
                "y": [places[stage]] * len(spans),
                "width": 0.7,
                "marker": {"color": "@blue", "line": {"width": 0}},
                "hovertext": [f"{stage}: {span.start:.2f} to {span.stop:.2f} s" for span in spans],
                "hoverinfo": "text",
                "showlegend": False,
            }
            for stage, spans in work.items()
        ],
        "layout": {
            "barmode": "overlay",
            "height": 110 + 34 * len(work),
            "xaxis": axis(unit),
            "yaxis": {
                "tickvals": list(places.values()),
                "ticktext": [f"{stage}, {busy[stage]:.1f} s" for stage in places],
                "showgrid": False,
                "zeroline": False,
                "automargin": True,
                "fixedrange": True,
            },
        },
    }
