"""Columns as they were put: the rows of a put stay together.

An object for every row costs more than a small row, and what is large costs as much to copy as to receive. So a column
of a put is one *block*, and rows that lie side by side in it are read in one piece; a large one is kept and read
without a copy. Invariant: a block pins at most twice the bytes of its rows that are still there; below that the
survivors move to a block of their own, which costs O(1) per deleted row, amortised.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import numpy as np

from headrace.contract import Array, Column, Ragged, join_columns
from headrace_storage.columns import Kind, entry_nbytes, kind_of, nbytes_of

LARGE_BYTES = 1 << 16
"""From here on a column is not copied."""


class Block:
    """``column`` of ``rows``, in this order. ``live``: bytes of those that are still there."""

    __slots__ = ("_places", "column", "live", "rows")

    def __init__(self, rows: list[int], column: Column) -> None:
        self.rows = rows
        self.column = column
        self.live = nbytes_of(column)
        self._places: dict[int, int] = {}
        """By row, once some of the rows are asked for without the others."""

    def part(self, rows: list[int]) -> Column:
        """Values of some of its rows; a view where they lie side by side."""
        if rows == self.rows:
            return self.column
        first, *rest = self._places_of(rows)
        if rest == list(range(first + 1, first + len(rows))):
            return _run(self.column, first, first + len(rows))
        return self.column.take([first, *rest]) if isinstance(self.column, Ragged) else self.column[[first, *rest]]

    def nbytes(self, rows: list[int]) -> int:
        """Of some of its rows."""
        if rows == self.rows:
            return nbytes_of(self.column)
        if not isinstance(self.column, Ragged):
            return int(self.column.nbytes // len(self.column)) * len(rows)
        offsets = self.column.offsets
        entries = sum(offsets.item(place + 1) - offsets.item(place) for place in self._places_of(rows))
        return int(entries) * entry_nbytes(kind_of(self.column))

    def _places_of(self, rows: list[int]) -> list[int]:
        if not self._places:
            self._places = {row: place for place, row in enumerate(self.rows)}
        return [self._places[row] for row in rows]


class MemoryColumn:
    """All rows of a column."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        """What a column must be to fit."""
        self.nbytes = 0
        """Of the rows' values."""
        self._where: dict[int, Block] = {}

    def __len__(self) -> int:
        return len(self._where)

    def put(self, rows: list[int], column: Column) -> int:
        """Store ``column[i]`` for ``rows[i]``; its arrays belong to the storage afterwards. Returns its bytes."""
        if not self._where.keys().isdisjoint(rows):
            self.delete(rows)
        nbytes = nbytes_of(column)
        self._keep(rows, _copied(column) if nbytes < LARGE_BYTES else _owned(column))
        self.nbytes += nbytes
        return nbytes

    def get(self, rows: Sequence[int]) -> Column:
        """In the order of ``rows``; a view where that is much and lies side by side. KeyError with an absent row."""
        parts = [block.part(list(some)) for block, some in groupby(rows, self._where.__getitem__)]
        if len(parts) == 1:
            return parts[0] if nbytes_of(parts[0]) >= LARGE_BYTES else _copied(parts[0])
        return join_columns(parts) if parts else self._none()

    def delete(self, rows: Sequence[int]) -> None:
        """Forget these rows, none of them twice; those without a value are skipped."""
        where = self._where
        touched: set[Block] = set()
        for block, some in groupby([row for row in rows if row in where], where.__getitem__):
            gone = list(some)
            nbytes = block.nbytes(gone)
            self.nbytes -= nbytes
            block.live -= nbytes
            for row in gone:
                del where[row]
            touched.add(block)
        for block in touched:
            if 2 * block.live < nbytes_of(block.column):
                self._move(block)

    def _keep(self, rows: list[int], column: Column) -> None:
        self._where.update(dict.fromkeys(rows, Block(rows, column)))

    def _move(self, block: Block) -> None:
        left = [row for row in block.rows if self._where.get(row) is block]
        if left:
            self._keep(left, _copied(block.part(left)))

    def _none(self) -> Column:
        layout, dtype, shape = self.kind
        values: Array = np.empty((0, *shape), dtype)
        return Ragged(values, np.zeros(1, np.int64)) if layout == "ragged" else values


def _run(column: Column, start: int, stop: int) -> Column:
    """A view of rows that lie side by side."""
    if not isinstance(column, Ragged):
        return column[start:stop]
    offsets = column.offsets[start : stop + 1]
    return Ragged(column.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _copied(column: Column) -> Column:
    return Ragged(column.values.copy(), column.offsets.copy()) if isinstance(column, Ragged) else column.copy()


def _owned(column: Column) -> Column:
    """``column``, copied where its arrays are parts of larger ones."""
    if isinstance(column, Ragged):
        return Ragged(_alone(column.values), _alone(column.offsets))
    return _alone(column)


def _alone(array: Array) -> Array:
    base = array.base
    return array.copy() if isinstance(base, np.ndarray) and base.nbytes > array.nbytes else array
