"""How long calls take, counted by powers of two: an addition per call, and nothing kept of the call itself."""

from __future__ import annotations

from collections.abc import Iterator

_SHORTEST = 1e-5
"""Seconds: the upper bound of the first class."""
_CLASSES = 24
"""The last but one ends at 42 s; the last has no end."""


class Latency:
    """Of one method's calls."""

    def __init__(self) -> None:
        self.total = 0.0
        """Seconds, of all calls."""
        self._counts = [0] * _CLASSES

    def add(self, seconds: float) -> None:
        """A call has ended."""
        self.total += seconds
        self._counts[min(int(seconds / _SHORTEST).bit_length(), _CLASSES - 1)] += 1

    def up_to(self) -> Iterator[tuple[float, int]]:
        """How many calls took less than so many seconds, shortest first; the last is all of them."""
        count = 0
        for place, more in enumerate(self._counts):
            count += more
            yield (_SHORTEST * 2**place if place < _CLASSES - 1 else float("inf")), count
