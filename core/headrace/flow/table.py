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
        self._base = first
        self._capacity = FIRST_CAPACITY
        self._columns: dict[str, Array] = {
            name: np.zeros((FIRST_CAPACITY, *shape), dtype=dtype) for name, (dtype, shape) in columns.items()
        }

    def __contains__(self, record: int) -> bool:
        return self.low <= record < self.end

    def append(self) -> int:
        """The id of a new record, all zeros."""
        if self.end - self._base == self._capacity:
            self._make_room()
        self.end += 1
        return self.end - 1

    def forget(self, below: int) -> None:
        """Records ``< below`` will not be asked for again."""
        self.low = max(self.low, min(below, self.end))

    def get(self, column: str, record: int) -> Any:
        """A record's value in a column; a view where the value is an array."""
        return self._columns[column][record - self._base]

    def set(self, column: str, record: int, value: Any) -> None:
        """Replace a record's value in a column."""
        self._columns[column][record - self._base] = value

    def _make_room(self) -> None:
        kept, offset = self.end - self.low, self.low - self._base
        capacity = self._capacity if 2 * kept <= self._capacity else 2 * self._capacity
        for name, old in self._columns.items():
            new = np.zeros((capacity, *old.shape[1:]), dtype=old.dtype)
            new[:kept] = old[offset : offset + kept]
            self._columns[name] = new
        self._base, self._capacity = self.low, capacity
