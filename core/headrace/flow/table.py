"""Records with consecutive ids, one growing array per column.

Ids are given out in order and forgotten from the low end, so that a long run needs memory for what is outstanding
only. Invariant: ids ``low <= i < end`` are remembered, and a fresh record is zero in every column.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.contract import Array

FIRST_CAPACITY = 64


class Table:
    """``columns``: name → (dtype, shape of one record's value). Appending and forgetting are O(1) amortised."""

    def __init__(self, columns: Mapping[str, tuple[type[np.generic], tuple[int, ...]]], *, first: int) -> None:
        self.low = self.end = first
        self.base = first
        """The id in the first slot."""
        self._capacity = FIRST_CAPACITY
        self.columns: dict[str, Array] = {
            name: np.zeros((FIRST_CAPACITY, *shape), dtype=dtype) for name, (dtype, shape) in columns.items()
        }
        """All values of a column, by slot."""

    def __contains__(self, record: int) -> bool:
        return self.low <= record < self.end

    def append(self, count: int = 1) -> int:
        """The id of the first of ``count`` new records, all zeros."""
        if self.end + count - self.base > self._capacity:
            self._make_room(count)
        self.end += count
        return self.end - count

    def forget(self, below: int) -> None:
        """Records ``< below`` will not be asked for again."""
        self.low = max(self.low, min(below, self.end))

    def get(self, column: str, record: int) -> Any:
        """A record's value in a column; a view where the value is an array."""
        return self.columns[column][record - self.base]

    def set(self, column: str, record: int, value: Any) -> None:
        """Replace a record's value in a column."""
        self.columns[column][record - self.base] = value

    def slots(self, records: Array) -> Array:
        """Where in ``columns`` records are, until the next :meth:`append`."""
        return records - self.base

    def slice(self, first: int, count: int) -> slice:
        """The same of ``count`` consecutive records."""
        return slice(first - self.base, first - self.base + count)

    def _make_room(self, count: int) -> None:
        kept, offset = self.end - self.low, self.low - self.base
        capacity = self._capacity
        while 2 * kept > capacity or kept + count > capacity:
            capacity *= 2
        for name, old in self.columns.items():
            new = np.zeros((capacity, *old.shape[1:]), dtype=old.dtype)
            new[:kept] = old[offset : offset + kept]
            self.columns[name] = new
        self.base, self._capacity = self.low, capacity
