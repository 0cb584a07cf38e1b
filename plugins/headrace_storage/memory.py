"""Values in the memory of the storage unit's process.

Invariant: a row pins its own bytes and nothing else. Rows of one message come and go one by one, so nothing
that was put is kept as a view.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.contract import Batch, Column, Ragged, Storage, StorageStats
from headrace.errors import ContractError
from headrace_storage.columns import DenseColumn, RaggedColumn, kind_of, say


class MemoryStorage(Storage):
    """The first row of a column sets its layout, dtype and value shape; ContractError for a row that differs. A column
    without rows is forgotten."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._columns: dict[str, DenseColumn | RaggedColumn] = {}
        self._rows: set[int] = set()

    def put(self, batch: Batch) -> int:
        rows: list[int] = batch.rows.tolist()
        if len(set(rows)) != len(rows):
            raise ContractError("a put names a row twice", fix="put every row once")
        for name, column in batch.columns.items():
            self._check(name, column)
        if not rows or not batch.columns:
            return 0
        stored = 0
        for name, column in batch.columns.items():
            stored += self._put(name, rows, column)
        self._rows.update(rows)
        return stored

    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        found: dict[str, Column] = {}
        for name in columns:
            if name not in self._columns:
                raise KeyError(f"no row has column {name!r}; columns are {sorted(self._columns)}")
            try:
                found[name] = self._columns[name].get(rows)
            except KeyError as error:
                raise KeyError(f"row {error.args[0]} has no column {name!r}") from None
        return Batch(rows=np.asarray(rows, dtype=np.int64), columns=found)

    def delete(self, rows: Sequence[int]) -> None:
        known = self._rows.intersection(rows)
        self._rows -= known
        for name, store in list(self._columns.items()):
            store.delete(list(known))
            if not len(store):
                del self._columns[name]

    def stats(self) -> StorageStats:
        return StorageStats(rows=len(self._rows), nbytes=sum(store.nbytes for store in self._columns.values()))

    def close(self) -> None:
        self._columns.clear()
        self._rows.clear()

    def _check(self, name: str, column: Column) -> None:
        store = self._columns.get(name)
        if store is not None and store.kind != kind_of(column):
            raise ContractError(
                f"column {name!r} is {say(store.kind)}, a put gave {say(kind_of(column))}",
                fix="give every row of a column the same dtype and shape",
            )

    def _put(self, name: str, rows: list[int], column: Column) -> int:
        store = self._columns.get(name)
        if isinstance(column, Ragged):
            if not isinstance(store, RaggedColumn):
                store = self._columns[name] = RaggedColumn(column)
            store.put(rows, column)
            return int(column.values.nbytes)
        if not isinstance(store, DenseColumn):
            store = self._columns[name] = DenseColumn(column)
        store.put(rows, column)
        return int(column.nbytes)
