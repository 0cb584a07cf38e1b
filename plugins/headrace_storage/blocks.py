"""Columns of large puts, kept as they came.

Copying what was received costs as much as receiving it, and so does joining rows for whoever reads them together as
they were put together. So a large column of a put stays one *block*, and rows that lie side by side in it are read as
a view. Invariant: a block pins at most twice the bytes of its rows that are still there; below that the survivors move
to a block of their own, which costs O(1) per deleted row, amortised.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.contract import Array, Column, Ragged
from headrace_storage.columns import Kind, SmallColumn, nbytes_of

LARGE_BYTES = 1 << 16


class Block:
    """Values of ``rows``; None for a row that was deleted."""

    def __init__(self, rows: Sequence[int], column: Column) -> None:
        self.rows: list[int | None] = list(rows)
        self.column = column
        self.pinned = self.live = nbytes_of(column)
        """Bytes: of all its rows, and of those that are still there."""

    def nbytes(self, place: int) -> int:
        """Of one row's value."""
        if isinstance(self.column, Ragged):
            start, stop = self.column.offsets[place : place + 2].tolist()
            return int((stop - start) * (self.column.values.nbytes // max(1, len(self.column.values))))
        return int(self.column.nbytes // len(self.column))

    def value(self, place: int) -> Array:
        """A view."""
        value: Array = self.column[place]
        return value

    def run(self, start: int, stop: int) -> Column:
        """A view of rows that lie side by side."""
        if not isinstance(self.column, Ragged):
            return self.column[start:stop]
        offsets = self.column.offsets[start : stop + 1]
        return Ragged(self.column.values[offsets[0] : offsets[-1]], offsets - offsets[0])


class Blocks:
    """Rows of one column."""

    def __init__(self) -> None:
        self._where: dict[int, tuple[Block, int]] = {}
        self.nbytes = 0

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, row: int) -> bool:
        return row in self._where

    def put(self, rows: Sequence[int], column: Column) -> None:
        """Keep ``column``, whose arrays nobody else uses."""
        self.delete(rows)
        self._keep(rows, column)
        self.nbytes += nbytes_of(column)

    def _keep(self, rows: Sequence[int], column: Column) -> None:
        block = Block(rows, column)
        for place, row in enumerate(rows):
            self._where[row] = block, place

    def run(self, rows: Sequence[int]) -> Column | None:
        """A view of ``rows``, where they lie side by side in a block."""
        block, start = self._where.get(rows[0], (None, 0)) if rows else (None, 0)
        if block is None or block.rows[start : start + len(rows)] != list(rows):
            return None
        return block.run(start, start + len(rows))

    def value(self, row: int) -> Array:
        """A view. KeyError for an absent row."""
        block, place = self._where[row]
        return block.value(place)

    def delete(self, rows: Sequence[int]) -> None:
        """Forget these rows; those without a value are skipped."""
        touched: dict[int, Block] = {}
        for row in rows:
            found = self._where.pop(row, None)
            if found is not None:
                block, place = found
                nbytes = block.nbytes(place)
                self.nbytes -= nbytes
                block.live -= nbytes
                block.rows[place] = None
                touched[id(block)] = block
        for block in touched.values():
            if 2 * block.live < block.pinned:
                self._move(block)

    def _move(self, block: Block) -> None:
        places = [place for place, row in enumerate(block.rows) if row is not None]
        rows = [row for row in block.rows if row is not None]
        column = block.column.take(places) if isinstance(block.column, Ragged) else block.column[places]
        if rows:
            self._keep(rows, column)


def owned(column: Column) -> Column:
    """``column``, copied where its arrays are parts of larger ones."""
    if isinstance(column, Ragged):
        return Ragged(_owned(column.values), column.offsets)
    return _owned(column)


def _owned(array: Array) -> Array:
    base = array.base
    return array.copy() if isinstance(base, np.ndarray) and base.nbytes > array.nbytes else array


class MemoryColumn:
    """All rows of a column: those of large puts in blocks, the others one by one."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        """What a column must be to fit."""
        self._large = Blocks()
        self._small = SmallColumn(kind)

    def __len__(self) -> int:
        return len(self._small) + len(self._large)

    @property
    def nbytes(self) -> int:
        """Of the rows' values."""
        return self._small.nbytes + self._large.nbytes

    def put(self, rows: Sequence[int], column: Column) -> int:
        """Store ``column[i]`` for ``rows[i]``; its arrays belong to the storage afterwards. Returns its bytes."""
        nbytes = nbytes_of(column)
        if nbytes >= LARGE_BYTES:
            self._small.delete(rows)
            self._large.put(rows, owned(column))
        else:
            if len(self._large):
                self._large.delete(rows)
            self._small.put(rows, column)
        return nbytes

    def get(self, rows: Sequence[int]) -> Column:
        """In the order of ``rows``; a view where they lie side by side in a block. KeyError with an absent row."""
        if not len(self._large):
            return self._small.get(rows)
        run = self._large.run(rows)
        if run is not None:
            return run
        values = [self._large.value(row) if row in self._large else self._small.get([row])[0] for row in rows]
        if self.kind[0] == "ragged":
            return Ragged.from_arrays(values) if values else self._small.get(rows)
        return np.stack(values) if values else self._small.get(rows)

    def delete(self, rows: Sequence[int]) -> None:
        """Forget these rows; those without a value are skipped."""
        self._small.delete(rows)
        if len(self._large):
            self._large.delete(rows)
