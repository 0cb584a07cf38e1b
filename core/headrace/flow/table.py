"""Records with consecutive ids, in growing arrays.

Ids are given out in order and forgotten from the low end, so that a long run needs memory for what is outstanding
only. What is known of a record lies side by side: whoever works on a few records touches few places of memory, and
fills in all columns of new ones at once. Invariant: ids ``low <= i < end`` are remembered, and a fresh record is zero
in every column unless it is made like another.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from headrace.contract import Array

FIRST_CAPACITY = 64

Columns: TypeAlias = Mapping[str, tuple[type[np.generic], tuple[int, ...]]]
"""Name → dtype and shape of one value."""


class Fresh(NamedTuple):
    """What new records are copies of, as bytes."""

    record: Array
    member: Array


class Table:
    """``columns``: of records; ``of_members``: of each of the ``members`` that every record has. Appending and
    forgetting are O(1) amortised."""

    def __init__(
        self, columns: Columns, *, first: int, of_members: Columns = MappingProxyType({}), members: int = 0
    ) -> None:
        self.low = self.end = first
        self.base = first
        """The id in the first slot."""
        self._size = members
        self._keep(np.zeros(FIRST_CAPACITY, _dtype(columns)), np.zeros(FIRST_CAPACITY * members, _dtype(of_members)))

    def _keep(self, records: Array, members: Array) -> None:
        self._records, self._members = records, members
        self._raw = _bytes(records), _bytes(members)
        self._capacity = len(records)
        self.members: dict[str, Array] = {name: members[name] for name in members.dtype.names or ()}
        """All values of a column of members, those of a record next to one another."""
        self.columns: dict[str, Array] = {name: records[name] for name in records.dtype.names or ()}
        """All values of a column by slot; those of members by slot and member."""
        for name, column in self.members.items():
            self.columns[name] = column.reshape(len(records), self._size, *column.shape[1:])
        self._parts: dict[tuple[str, int], Array] = {}

    def __contains__(self, record: int) -> bool:
        return self.low <= record < self.end

    def append(self, count: int = 1, like: Fresh | None = None) -> int:
        """The id of the first of ``count`` new records: all zeros, or as :meth:`fresh` says."""
        if self.end + count - self.base > self._capacity:
            self._make_room(count)
        first = self.end
        self.end += count
        if like is not None:
            for array, size, record in zip(self._raw, (1, self._size), like, strict=True):
                start, stop = (first - self.base) * size, (self.end - self.base) * size
                if stop == start + 1:  # a slice costs ten times as much
                    array[start] = record
                else:
                    array[start:stop] = record
        return first

    def fresh(self, **values: Any) -> Fresh:
        """Records with these values in these columns, and zeros."""
        record, member = np.zeros(1, self._records.dtype), np.zeros(1, self._members.dtype)
        for name, value in values.items():
            (record if name in (record.dtype.names or ()) else member)[name] = value
        return Fresh(_bytes(record)[0], _bytes(member)[0])

    def forget(self, below: int) -> None:
        """Records ``< below`` will not be asked for again."""
        self.low = max(self.low, min(below, self.end))

    def get(self, column: str, record: int) -> Any:
        """A record's value in a column; a view where the value is an array."""
        return self.columns[column][record - self.base]

    def set(self, column: str, record: int, value: Any) -> None:
        """Replace a record's value in a column."""
        self.columns[column][record - self.base] = value

    def part(self, column: str, place: int) -> Array:
        """Of all values of a column, each an array, what they have at ``place``: by slot, or one member after another;
        a view, until the next :meth:`append`."""
        part = self._parts.get((column, place))
        if part is None:
            part = self._parts[column, place] = self.members.get(column, self.columns[column])[:, place]
        return part

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
        size = self._size
        self._keep(
            _moved(self._records, offset, kept, capacity),
            _moved(self._members, offset * size, kept * size, capacity * size),
        )
        self.base = self.low


def _dtype(columns: Columns) -> np.dtype[np.void]:
    return np.dtype([(name, kind, shape) for name, (kind, shape) in columns.items()], align=True)


def _bytes(records: Array) -> Array:
    """Records of which numpy knows no more than how long they are: it copies them for a fraction of the cost."""
    return records.view(np.dtype((np.void, records.dtype.itemsize)))


def _moved(old: Array, first: int, count: int, capacity: int) -> Array:
    new = np.zeros(capacity, old.dtype)
    new[:count] = old[first : first + count]
    return new
