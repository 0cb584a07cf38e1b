"""Values in the memory of the storage unit's process.

Invariant: rows pin at most twice their own bytes. Rows of one message come and go one by one, so what is small is
copied out of it, and what is large is kept only while most of it is there.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.contract import Batch, Column, Storage, StorageStats
from headrace_storage.blocks import MemoryColumn
from headrace_storage.columns import check, kind_of


class MemoryStorage(Storage):
    """The first row of a column sets its layout, dtype and value shape; ContractError for a row that differs. A column
    without rows is forgotten."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._columns: dict[str, MemoryColumn] = {}
        self._rows: set[int] = set()

    def put(self, batch: Batch) -> int:
        rows = check(batch, self._columns)
        if not rows or not batch.columns:
            return 0
        stored = 0
        for name, column in batch.columns.items():
            store = self._columns.get(name)
            if store is None:
                store = self._columns[name] = MemoryColumn(kind_of(column))
            stored += store.put(rows, column)
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
        known = [row for row in dict.fromkeys(rows) if row in self._rows]
        self._rows.difference_update(known)
        for name, store in list(self._columns.items()):
            store.delete(known)
            if not len(store):
                del self._columns[name]

    def stats(self) -> StorageStats:
        return StorageStats(rows=len(self._rows), nbytes=sum(store.nbytes for store in self._columns.values()))

    def close(self) -> None:
        self._columns.clear()
        self._rows.clear()
