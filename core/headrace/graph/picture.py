"""The stages of every phase as one SVG: a box per stage, left to right, and an arrow per edge with its columns.

Every arrow has a line of its own below the boxes, from its source's stem to its target's, so that nothing overlaps
whatever the graph is. Letters are of one width, which is what a label's room is measured in.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from textwrap import wrap
from xml.sax.saxutils import escape

from headrace.config import Job, Phase
from headrace.flow.stages import Flowing, Stage, flowing
from headrace.graph.declared import phase_stages

MARGIN, BOX_WIDTH, BOX_HEIGHT, STEP = 24, 110, 30, 190
"""Pixels, as everything below; a stage stands a ``STEP`` to the right of the one before."""
TITLE, LETTER, LINE, GAP = 26, 7.25, 15, 20
"""Height of a heading, width of a letter, height of a line of letters, and room around an arrow."""

HEAD = """\
<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">
<title>{title}</title>
<style>
text {{ font: 12px ui-monospace, monospace; fill: #1c2733 }}
.heading {{ font-weight: bold; font-size: 14px }}
.label {{ paint-order: stroke; stroke: #ffffff; stroke-width: 4px }}
.name {{ text-anchor: middle }}
rect {{ fill: #eef3f8; stroke: #46627f }}
.paper {{ fill: #ffffff; stroke: none }}
.stem {{ stroke: #b9c6d3; stroke-dasharray: 3 4 }}
.arrow {{ stroke: #46627f; stroke-width: 1.5; marker-end: url(#tip) }}
</style>
<defs><marker id="tip" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">\
<path d="M0 0L8 4L0 8z" fill="#46627f"/></marker></defs>
<rect class="paper" width="{width}" height="{height}"/>
"""


@dataclass(frozen=True, slots=True)
class _Arrow:
    """``y``: of the arrow itself; the lines of its label are above it."""

    start: int
    end: int
    y: int
    label: tuple[str, ...]


def draw(job: Job) -> str:
    """The picture, an SVG document."""
    y, parts, most = MARGIN, [], 1
    for phase in job.phases:
        stages = phase_stages(phase)
        most = max(most, len(stages))
        block, y = _phase(phase, stages, y)
        parts += block
    width = 2 * MARGIN + (most - 1) * STEP + BOX_WIDTH
    title = escape(f"{job.job.name}: what is done to rows")
    return "\n".join([HEAD.format(width=width, height=y, title=title).rstrip(), *parts, "</svg>\n"])


def _phase(phase: Phase, stages: tuple[Stage, ...], top: int) -> tuple[list[str], int]:
    """A phase's elements, and where the next phase begins."""
    boxes = top + TITLE
    places = {stage.name: MARGIN + place * STEP + BOX_WIDTH // 2 for place, stage in enumerate(stages)}
    arrows, bottom = _arrows(flowing(stages), places, boxes + BOX_HEIGHT + GAP)
    heading = _text(MARGIN, top + LINE, f"{phase.name}: {phase.algorithm.use}", "heading")
    stems = [_line("stem", x, boxes + BOX_HEIGHT, x, bottom) for x in places.values()]
    parts = [heading, *stems]
    for name, x in places.items():
        parts.append(
            f'<rect x="{x - BOX_WIDTH // 2}" y="{boxes}" width="{BOX_WIDTH}" height="{BOX_HEIGHT}" rx="5"/>'
            f"{_text(x, boxes + BOX_HEIGHT // 2 + 4, name, 'name')}"
        )
    for arrow in arrows:
        parts += _drawn(arrow)
    return parts, bottom + MARGIN


def _arrows(edges: tuple[Flowing, ...], places: dict[str, int], y: int) -> tuple[list[_Arrow], int]:
    """One below the other; and where the last one ends."""
    arrows = []
    for edge in edges:
        start, end = places[edge.source], places[edge.target]
        label = tuple(wrap(", ".join(edge.columns), int((end - start - GAP) / LETTER)))
        y += len(label) * LINE
        arrows.append(_Arrow(start, end, y, label))
        y += GAP
    return arrows, y


def _drawn(arrow: _Arrow) -> Iterator[str]:
    first = arrow.y - 5 - (len(arrow.label) - 1) * LINE
    for number, line in enumerate(arrow.label):
        yield _text(arrow.start + GAP // 2, first + number * LINE, line)
    yield _line("arrow", arrow.start, arrow.y, arrow.end, arrow.y)


def _line(kind: str, x1: int, y1: int, x2: int, y2: int) -> str:
    return f'<line class="{kind}" x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"/>'


def _text(x: int, y: int, text: str, kind: str = "label") -> str:
    return f'<text class="{kind}" x="{x}" y="{y}">{escape(text)}</text>'
