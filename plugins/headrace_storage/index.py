"""Which bytes are the value of a row in a column, for storages that keep values as bytes of larger pieces."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Generic, NamedTuple, TypeAlias, TypeVar

import numpy as np

from headrace.contract import Array, Batch, Column, Ragged, StorageStats
from headrace_storage.columns import Kind, check, entry_nbytes, kind_of, nbytes_of

P = TypeVar("P")
"""What holds the bytes."""
Value: TypeAlias = tuple[P, int, int]
"""Bytes from start to stop of what holds them."""


class Forgotten(NamedTuple, Generic[P]):
    """A value that is not in the index any more."""

    column: str
    row: int
    value: Value[P]


class IndexedColumn(Generic[P]):
    """The values of one column by row."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.values: dict[int, Value[P]] = {}


class Index(Generic[P]):
    """The first row of a column sets its layout, dtype and value shape. A column without rows is forgotten."""

    def __init__(self) -> None:
        self._columns: dict[str, IndexedColumn[P]] = {}
        self._rows: set[int] = set()
        self._nbytes = 0

    def check(self, batch: Batch) -> list[int]:
        """The rows of what is to be put. ContractError where it does not fit."""
        return check(batch, self._columns)

    def keep(self, rows: Sequence[int], name: str, column: Column, values: Iterable[Value[P]]) -> list[Forgotten[P]]:
        """Values of a column for these rows; returns those that they replace."""
        known = self._columns.setdefault(name, IndexedColumn(kind_of(column))).values
        old = [Forgotten(name, row, known[row]) for row in rows if row in known] if known else []
        known.update(zip(rows, values, strict=True))
        self._rows.update(rows)
        self._nbytes += nbytes_of(column) - sum(stop - start for _, _, (_, start, stop) in old)
        return old

    def forget(self, rows: Sequence[int]) -> list[Forgotten[P]]:
        """Drop these rows; unknown ones are ignored. Returns what they had."""
        known = self._rows.intersection(rows)
        self._rows -= known
        gone = []
        for name, column in list(self._columns.items()):
            gone += [Forgotten(name, row, column.values.pop(row)) for row in known if row in column.values]
            if not column.values:
                del self._columns[name]
        self._nbytes -= sum(stop - start for _, _, (_, start, stop) in gone)
        return gone

    def move(self, name: str, row: int, value: Value[P]) -> None:
        """The same value, elsewhere."""
        self._columns[name].values[row] = value

    def find(self, rows: Sequence[int], name: str) -> tuple[Kind, list[Value[P]]]:
        """Values in the order of ``rows``. KeyError names an absent row or column."""
        column = self._columns.get(name)
        if column is None:
            raise KeyError(f"no row has column {name!r}; columns are {sorted(self._columns)}")
        try:
            return column.kind, [column.values[row] for row in rows]
        except KeyError as error:
            raise KeyError(f"row {error.args[0]} has no column {name!r}") from None

    def stats(self) -> StorageStats:
        """O(1)."""
        return StorageStats(rows=len(self._rows), nbytes=self._nbytes)

    def clear(self) -> None:
        """Forget everything."""
        self._columns.clear()
        self._rows.clear()
        self._nbytes = 0


def runs(values: Iterable[Value[P]]) -> Iterator[Value[P]]:
    """The same bytes with neighbours joined; empty values are left out."""
    last: Value[P] | None = None
    for place, start, stop in values:
        if start == stop:
            continue
        if last is not None and last[0] is place and last[2] == start:
            last = (place, last[1], stop)
            continue
        if last is not None:
            yield last
        last = (place, start, stop)
    if last is not None:
        yield last


def lengths(kind: Kind, values: Sequence[Value[P]]) -> Array | None:
    """int64 [n]: the entries of each row of a ragged column; None for a dense one."""
    if kind[0] == "dense":
        return None
    size = entry_nbytes(kind)
    return np.fromiter(((stop - start) // size for _, start, stop in values), np.int64, len(values))


def raw(column: Column) -> Array:
    """The bytes of a column as uint8; a copy only where it is not contiguous."""
    values = column.values if isinstance(column, Ragged) else column
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


def assemble(kind: Kind, values: Sequence[Value[P]], joined: Array) -> Column:
    """The column whose rows' bytes, joined, are given."""
    _, dtype, shape = kind
    entries = lengths(kind, values)
    if entries is None:
        return joined.view(dtype).reshape(len(values), *shape)
    offsets = np.zeros(len(values) + 1, np.int64)
    np.cumsum(entries, out=offsets[1:])
    return Ragged(joined.view(dtype).reshape(int(offsets[-1]), *shape), offsets)
