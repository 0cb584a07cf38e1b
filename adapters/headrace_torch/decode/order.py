"""Which rows attend together, so that one long sequence does not pad all the others.

All sequences grow by one token a step, so an order by length, once made, holds until rows join or leave.
Rows are therefore kept roughly sorted, and attention runs over segments of neighbours, each padded to its own
longest. Costs are counted in row-tokens: one key and value read by one row.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.contract.columns import Array

_BLOCK = 16
"""Rows that are never parted."""
_TOKEN_MOVE = 0.25
"""Row-tokens a step must save per moved token: a move costs a few reads, and an order lasts for many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Rows ``first`` to ``first + count``, padded to ``longest`` keys."""

    first: int
    count: int
    longest: int


def segments(lengths: Array, *, overhead: int) -> list[Segment]:
    """Cut rows with ``lengths`` keys (int64 [n], n >= 1) into segments; one more costs ``overhead`` row-tokens."""
    starts = np.arange(0, len(lengths), _BLOCK)
    longest = np.maximum.reduceat(lengths, starts).tolist()
    found = [Segment(first=0, count=min(_BLOCK, len(lengths)), longest=longest[0])]
    for start, length in zip(starts.tolist()[1:], longest[1:], strict=True):
        last, count = found[-1], min(_BLOCK, len(lengths) - start)
        padding = abs(last.longest - length) * (count if length < last.longest else last.count)
        if padding <= overhead:
            joined = max(last.longest, length)
            found[-1] = Segment(first=last.first, count=last.count + count, longest=joined)
        else:
            found.append(Segment(first=start, count=count, longest=length))
    return found


def cost(parts: list[Segment], *, overhead: int) -> int:
    """Row-tokens of one step."""
    return sum(part.count * part.longest + overhead for part in parts)


def sorting_moves(lengths: Array, *, overhead: int) -> tuple[list[int], list[int]]:
    """Moves (sources, targets) that bring rows into blocks by falling length; none when that does not pay.

    Rows that are in the right block stay where they are.
    """
    order = np.argsort(-lengths, kind="stable")
    saved = cost(segments(lengths, overhead=overhead), overhead=overhead) - cost(
        segments(lengths[order], overhead=overhead), overhead=overhead
    )
    places = np.arange(len(lengths))
    strays = order[order // _BLOCK != places // _BLOCK]
    if saved <= overhead + _TOKEN_MOVE * lengths[strays].sum():
        return [], []
    # A block has as many strays to receive as rows to give away, both in ascending order of blocks.
    return strays.tolist(), np.sort(strays).tolist()
