"""What instances and the trainer did, as a page with one picture per policy, all on the same scale.

Every bar is a trajectory from its dispatch to its last token, or a stretch of training; its colour is its policy
version. Invariant: a page stands alone and is written whole or not at all.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

from headrace.errors import RunError
from headrace.simulate.simulation import Span

INSTANCES, STEPS = 4, 8
"""Instances that are drawn, and the steps, the last ones."""
WIDTH, LANE, LABEL = 1100.0, 5.0, 110.0
"""Pixels."""
TRAINER = "trainer"


@dataclass(slots=True)
class Recording:
    """The spans of one policy that will be drawn."""

    policy: str
    spans: list[Span] = field(default_factory=list)

    def hear(self, span: Span) -> None:
        """A span ended."""
        if not span.instance or int(span.instance.rpartition("-")[2]) < INSTANCES:
            self.spans.append(span)


def write_gantt(path: Path, recordings: Sequence[tuple[Recording, float]]) -> None:
    """``recordings``: with the seconds of a step of each. RunError when the page cannot be written."""
    window = STEPS * max(step for _, step in recordings)
    body = "\n".join(_picture(recording, window) for recording, _ in recordings)
    page = (
        "<!doctype html><meta charset='utf-8'><title>headrace simulate</title>"
        "<style>body{font:14px sans-serif;margin:2em}svg{display:block;margin-bottom:2em}text{font-size:11px}</style>"
        f"<h1>What each instance and the trainer did</h1><p>The last {window:.4g} simulated seconds; a bar is a "
        f"trajectory or a batch in training, its colour the policy version.</p>\n{body}\n"
    )
    hidden = path.with_name(f".{path.name}.partial")
    try:
        hidden.write_text(page, encoding="utf-8")
        hidden.replace(path)
    except OSError as error:
        raise RunError(
            f"the picture cannot be written: {error.strerror or error}",
            origin=f"--gantt {path}",
            fix="name a file in a folder that is there and may be written to",
        ) from error


def _picture(recording: Recording, window: float) -> str:
    end = max(span.stop for span in recording.spans)
    of_row: defaultdict[str, list[Span]] = defaultdict(list)
    for span in recording.spans:
        if span.stop > end - window:
            of_row[span.instance or TRAINER].append(span)
    parts: list[str] = []
    top = 0.0
    for name in sorted(of_row, key=lambda row: (row != TRAINER, row)):
        lanes, bars = _lanes(of_row[name])
        height = LANE * max(lanes, 3)
        parts.append(f"<text x='0' y='{top + height / 2 + 4:.1f}'>{escape(name)}</text>")
        thick = height / lanes
        parts.extend(_bar(span, top + lane * thick, thick, end - window, window) for lane, span in bars)
        top += height + 2 * LANE
    return (
        f"<h2>{escape(recording.policy)}</h2><svg width='{LABEL + WIDTH:.0f}' height='{top:.0f}' "
        f"xmlns='http://www.w3.org/2000/svg'>{''.join(parts)}</svg>"
    )


def _lanes(spans: Sequence[Span]) -> tuple[int, list[tuple[int, Span]]]:
    """How many lanes spans need so that none overlap, and who is in which."""
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    placed: list[tuple[int, Span]] = []
    count = 0
    for span in sorted(spans, key=lambda span: (span.start, span.stop)):
        while busy and busy[0][0] <= span.start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        if not free:
            free.append(count)
            count += 1
        lane = heapq.heappop(free)
        heapq.heappush(busy, (span.stop, lane))
        placed.append((lane, span))
    return count, placed


def _bar(span: Span, top: float, height: float, begin: float, window: float) -> str:
    left = max(0.0, span.start - begin) / window * WIDTH
    right = (span.stop - begin) / window * WIDTH
    hue = span.version * 137.5 % 360
    return (
        f"<rect x='{LABEL + left:.1f}' y='{top:.1f}' width='{max(0.3, right - left):.1f}' "
        f"height='{max(0.5, height - 0.5):.1f}' fill='hsl({hue:.0f} 60% 60%)'><title>version {span.version}, "
        f"{span.stop - span.start:.4g} s</title></rect>"
    )
