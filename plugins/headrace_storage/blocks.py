"""Rows as they were put: what came together stays together.

An object for every row costs more than a small row, and what is large costs as much to copy as to receive. So the rows
of a put are one *block* with all its columns, and those that lie side by side in it are read in one piece; a large
column is kept and read without a copy. Invariant: a block pins at most twice the bytes of its rows that are still
there; below that the survivors move to a block of their own, which costs O(1) per deleted row, amortised.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import groupby
from typing import TypeAlias

import numpy as np

from headrace.contract import Array, Column, Ragged, join_columns
from headrace_storage.columns import entry_nbytes, kind_of, nbytes_of

LARGE_BYTES = 1 << 16
"""From here on a column is not copied."""
Places: TypeAlias = slice | list[int]


class Block:
    """Columns of ``rows``, in this order. ``pinned``: bytes of all of them; ``live``: of those that are still there."""

    __slots__ = ("_places", "columns", "live", "pinned", "rows")

    def __init__(self, rows: list[int], columns: Mapping[str, Column], nbytes: int) -> None:
        self.rows = rows
        self.columns = columns
        self.live = self.pinned = nbytes
        self._places: dict[int, int] = {}
        """By row, once some of the rows are asked for without the others."""

    def places(self, rows: list[int]) -> Places:
        """Of some of its rows."""
        if rows == self.rows:
            return slice(0, len(rows))
        if not self._places:
            self._places = {row: place for place, row in enumerate(self.rows)}
        places = [self._places[row] for row in rows]
        first, stop = places[0], places[0] + len(places)
        return slice(first, stop) if places == list(range(first, stop)) else places

    def nbytes(self, places: Places) -> int:
        """Of some of its rows."""
        return sum(_nbytes_at(column, places) for column in self.columns.values())


class Blocks:
    """Rows whose columns were put together."""

    def __init__(self) -> None:
        self._where: dict[int, Block] = {}
        self.at: Callable[[int], Block] = self._where.__getitem__
        """Where a row is. KeyError with one that is not here."""

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, row: int) -> bool:
        return row in self._where

    def put(self, rows: list[int], columns: Mapping[str, Column]) -> int:
        """Keep rows that are not here; the arrays belong to the storage from now on. Returns their bytes."""
        kept, total = {}, 0
        for name, column in columns.items():
            nbytes = nbytes_of(column)
            kept[name] = _copied(column) if nbytes < LARGE_BYTES else _owned(column)
            total += nbytes
        self._where.update(dict.fromkeys(rows, Block(rows, kept, total)))
        return total

    def among(self, rows: Sequence[int]) -> list[int]:
        """Those of ``rows`` that are here."""
        return [row for row in rows if row in self._where]

    def delete(self, rows: Sequence[int]) -> int:
        """Forget rows that are here, none of them twice. Returns their bytes."""
        deleted, touched = 0, set()
        for block, some in groupby(rows, self.at):
            gone = list(some)
            nbytes = block.nbytes(block.places(gone))
            block.live -= nbytes
            deleted += nbytes
            touched.add(block)
            for row in gone:
                del self._where[row]
        for block in touched:
            if 2 * block.live < block.pinned:
                self._move(block)
        return deleted

    def _move(self, block: Block) -> None:
        left = [row for row in block.rows if self._where.get(row) is block]
        if left:
            places = block.places(left)
            self.put(left, {name: _pick(column, places) for name, column in block.columns.items()})


def runs(rows: Sequence[int], at: Callable[[int], Block]) -> list[tuple[Block, Places]]:
    """Rows that follow one another in one block, and their places there."""
    return [(block, block.places(list(some))) for block, some in groupby(rows, at)]


def values(name: str, found: Sequence[tuple[Block, Places]]) -> Column:
    """A column of what :func:`runs` has found, at least one run; a view where that is one, and large."""
    if len(found) > 1:
        return join_columns([_pick(block.columns[name], places) for block, places in found])
    block, places = found[0]
    column = _pick(block.columns[name], places)
    return column if nbytes_of(column) >= LARGE_BYTES else _copied(column)


def _pick(column: Column, places: Places) -> Column:
    """Rows of a column; a view where they lie side by side."""
    if not isinstance(column, Ragged):
        return column[places]
    if isinstance(places, list):
        return column.take(places)
    if places.stop - places.start == len(column):
        return column
    offsets = column.offsets[places.start : places.stop + 1]
    return Ragged(column.values[offsets[0] : offsets[-1]], offsets - offsets[0])


def _nbytes_at(column: Column, places: Places) -> int:
    if not isinstance(column, Ragged):
        count = len(places) if isinstance(places, list) else places.stop - places.start
        return int(column.nbytes // len(column)) * count
    offsets = column.offsets
    if isinstance(places, list):
        entries = sum(offsets.item(place + 1) - offsets.item(place) for place in places)
    else:
        entries = offsets.item(places.stop) - offsets.item(places.start)
    return int(entries) * entry_nbytes(kind_of(column))


def _copied(column: Column) -> Column:
    return Ragged(column.values.copy(), column.offsets.copy()) if isinstance(column, Ragged) else column.copy()


def _owned(column: Column) -> Column:
    """Copied where its arrays are parts of larger ones."""
    return Ragged(_alone(column.values), _alone(column.offsets)) if isinstance(column, Ragged) else _alone(column)


def _alone(array: Array) -> Array:
    base = array.base
    return array.copy() if isinstance(base, np.ndarray) and base.nbytes > array.nbytes else array
