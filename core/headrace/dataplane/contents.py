"""Values that many rows have in common, such as the image of a prompt: sent once, and kept once in a storage.

A column that is ``by_content`` goes through the data plane as :class:`~headrace.contract.Repeated`. A unit keeps each
different value under an id below 0, which no row has, for as long as a row has it, and in another column of the rows
which value is whose.

Invariant: a value that no row has is not kept, and the same bytes of one column are kept once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import numpy as np
import xxhash

from headrace.contract import Array, Batch, Column, Ragged, Repeated, Storage, StorageStats, take_rows
from headrace.dataplane.messages import ColumnSchema
from headrace.wire.arrays import array_bytes

Value: TypeAlias = Array | Ragged | Repeated
"""A column as it may be put."""
_Key: TypeAlias = tuple[str, bytes]
"""A column, and the digest of a value's bytes."""


def digests(column: Column) -> list[bytes]:
    """xxh3-128 of each row's bytes."""
    return [xxhash.xxh3_128_digest(array_bytes(np.ascontiguousarray(value))) for value in column]


def by_content(column: Column) -> Repeated:
    """Each different value once, in the order of the rows."""
    numbers: dict[bytes, int] = {}
    places, first = np.empty(len(column), np.int64), []
    for row, digest in enumerate(digests(column)):
        if digest not in numbers:
            numbers[digest] = len(numbers)
            first.append(row)
        places[row] = numbers[digest]
    return Repeated(take_rows(column, np.array(first, np.int64)), places)


def once_each(schemas: Mapping[str, ColumnSchema], columns: Mapping[str, Value]) -> dict[str, Value]:
    """The columns, those that are ``by_content`` with each different value once."""
    found = dict(columns)
    for name, column in columns.items():
        if name in schemas and schemas[name].by_content and not isinstance(column, Repeated):
            found[name] = by_content(column)
    return found


def batch_of(rows: Array, values: Mapping[str, Value]) -> Batch:
    """Rows with columns of either kind."""
    columns: dict[str, Column] = {}
    repeated: dict[str, Repeated] = {}
    for name, value in values.items():
        if isinstance(value, Repeated):
            repeated[name] = value
        else:
            columns[name] = value
    return Batch(rows=rows, columns=columns, repeated=repeated)


def values_of(batch: Batch) -> dict[str, Value]:
    """Its columns, of either kind."""
    return {**batch.columns, **batch.repeated}


class Contents:
    """A storage to which repeated values can be given; other columns are its own business."""

    def __init__(self, storage: Storage) -> None:
        self._storage = storage
        self._rows: dict[str, set[int]] = {}
        """Of each repeated column: those that have it."""
        self._ids: dict[_Key, int] = {}
        self._held: dict[int, tuple[_Key, int]] = {}
        """By id: what it is, and how many rows have it."""
        self._next = -1

    def put(self, batch: Batch) -> None:
        """What :meth:`headrace.contract.Storage.put` does, of rows that do not have these columns yet."""
        if not batch.repeated:
            self._storage.put(batch)
            return
        ids: dict[str, Array] = {}
        try:
            for name, column in batch.repeated.items():
                ids[name] = self._hold(name, column)
            told = {whose(name): numbers for name, numbers in ids.items()}
            self._storage.put(Batch(rows=batch.rows, columns={**batch.columns, **told}))
        except BaseException:  # no row has them; raised again
            for numbers in ids.values():
                self._storage.delete(self._let_go(numbers))
            raise
        for name in ids:
            self._rows.setdefault(name, set()).update(batch.rows.tolist())

    def get(self, rows: Sequence[int], names: Sequence[str]) -> Batch:
        """What :meth:`headrace.contract.Storage.get` does; values that rows share come once."""
        if not self._rows:
            return self._storage.get(rows, names)
        batch = self._storage.get(rows, [name for name in names if name not in self._rows])
        repeated: dict[str, Repeated] = {}
        for name in names:
            if name in self._rows:
                ids, places = self.find(rows, name)
                repeated[name] = Repeated(self._storage.get(ids, [name]).columns[name], places)
        return Batch(rows=batch.rows, columns=batch.columns, repeated=repeated)

    def is_repeated(self, name: str) -> bool:
        """Whether rows share values of this column."""
        return name in self._rows

    def find(self, rows: Sequence[int], name: str) -> tuple[list[int], Array]:
        """Ids of the different values of a repeated column, as they were put, so that what came together may be one run
        of memory; and at which of them each row's is."""
        of_rows = self._storage.get(rows, [whose(name)]).dense(whose(name))
        numbers, places = np.unique(-of_rows, return_inverse=True)
        return (-numbers).tolist(), places.astype(np.int64, copy=False)

    def delete(self, rows: Sequence[int]) -> None:
        """Free these rows, and the values that no other row has."""
        gone: list[int] = []
        for name, holders in list(self._rows.items()):
            leaving = [row for row in dict.fromkeys(rows) if row in holders]
            if leaving:
                gone += self._let_go(self._storage.get(leaving, [whose(name)]).dense(whose(name)))
                holders.difference_update(leaving)
                if not holders:
                    del self._rows[name]
        self._storage.delete([*rows, *gone])

    def stats(self) -> StorageStats:
        """Of the rows, and the bytes of all values."""
        held = self._storage.stats()
        return StorageStats(rows=held.rows - len(self._held), nbytes=held.nbytes)

    def _hold(self, name: str, column: Repeated) -> Array:
        """The id of each row's value, int64 [n]; those that are not known yet are kept."""
        keys = [(name, digest) for digest in digests(column.values)]
        counts = np.bincount(column.places, minlength=len(keys)).tolist()
        new = {key: place for place, key in enumerate(keys) if counts[place] and key not in self._ids}
        if new:
            ids = np.arange(self._next, self._next - len(new), -1)
            values = take_rows(column.values, np.array(list(new.values()), np.int64))
            self._storage.put(Batch(rows=ids, columns={name: values}))
            self._ids.update(zip(new, ids.tolist(), strict=True))
            self._next -= len(new)
        for key, count in zip(keys, counts, strict=True):
            if count:
                self._held[self._ids[key]] = key, count + self._held.get(self._ids[key], (key, 0))[1]
        return np.array([self._ids.get(key, 0) for key in keys], np.int64)[column.places]

    def _let_go(self, ids: Array) -> list[int]:
        """One row less has each of these; says which nobody has now."""
        gone = []
        for number, count in zip(*(counted.tolist() for counted in np.unique(ids, return_counts=True)), strict=True):
            key, held = self._held[number]
            if held > count:
                self._held[number] = key, held - count
            else:
                del self._held[number], self._ids[key]
                gone.append(number)
        return gone


def whose(name: str) -> str:
    """The column that says which value of column ``name`` a row has. No column's own name ends so."""
    return f"{name}/"
