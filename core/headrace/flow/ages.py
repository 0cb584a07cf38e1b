"""How long the oldest group has been there, without a time for each: the ledger is looked at now and then instead."""

from __future__ import annotations

from collections import deque
from itertools import islice

_MARKS = 4096
"""Twice as many looks are remembered only every other one, so that age becomes coarser and memory does not grow."""


class Ages:
    """Group ids are given out in order. What was opened between two looks counts as opened at the second of them."""

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque()
        """(the next group's id, when it was looked)."""

    def look(self, now: float, *, oldest: int, end: int) -> None:
        """``oldest``: the first group that is open; ``end``: the id of the next one. O(1), amortised."""
        marks = self._marks
        while marks and marks[0][0] <= oldest:
            marks.popleft()
        if end > oldest and (not marks or marks[-1][0] < end):
            marks.append((end, now))
        if len(marks) > 2 * _MARKS:
            self._marks = deque(islice(marks, 0, None, 2))

    def oldest(self, now: float) -> float:
        """Seconds since the oldest group was opened, as far as the last look knew; 0 when there was none."""
        return now - self._marks[0][1] if self._marks else 0.0
