"""A storage that is a dictionary: slow, small and plain enough to be right by reading it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice, product

import numpy as np

from headrace.contract import Array, Batch, Column, Ragged, Storage, StorageStats
from headrace.errors import ContractError, RunError
from headrace.testing.trouble import FakeSettings, Trouble


class FakeStorage(Storage):
    """A piece of work is a ``put`` or a ``get``."""

    Settings = FakeSettings

    def __init__(self, settings: FakeSettings) -> None:
        super().__init__(settings)
        self._trouble = Trouble(settings, error=RunError)
        self._values: dict[str, dict[int, Array]] = {}
        """One array per column and row; a dense value is an array too, of one dimension less."""
        self._ragged: set[str] = set()

    def put(self, batch: Batch) -> int:
        self._trouble.work("storing rows")
        self._check(batch)
        stored = 0
        for name, column in batch.columns.items():
            values = self._values.setdefault(name, {})
            if isinstance(column, Ragged):
                self._ragged.add(name)
            for row, value in zip(batch.rows.tolist(), column, strict=True):
                values[row] = np.array(value)
                stored += values[row].nbytes
        return stored

    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        self._trouble.work("reading rows")
        return Batch(rows=np.array(rows, dtype=np.int64), columns={name: self._column(name, rows) for name in columns})

    def delete(self, rows: Sequence[int]) -> None:
        for values in self._values.values():
            for row in rows:
                values.pop(row, None)

    def stats(self) -> StorageStats:
        held = {row for values in self._values.values() for row in values}
        return StorageStats(
            rows=len(held), nbytes=sum(value.nbytes for values in self._values.values() for value in values.values())
        )

    def close(self) -> None:
        self._values.clear()

    def _check(self, batch: Batch) -> None:
        if len(set(batch.rows.tolist())) < len(batch.rows):
            raise ContractError(f"a put names a row twice: {batch.rows.tolist()}", fix="name every row once")
        for name, column in batch.columns.items():
            for kept, value in product(islice(self._values.get(name, {}).values(), 1), column):
                if _kind(kept, ragged=name in self._ragged) != _kind(value, ragged=isinstance(column, Ragged)):
                    raise ContractError(
                        f"column {name!r} has values {kept.dtype} {kept.shape} and {value.dtype} {value.shape}",
                        fix="give a column one dtype and one shape, or ragged rows that differ in their length alone",
                    )

    def _column(self, name: str, rows: Sequence[int]) -> Column:
        if name not in self._values:
            raise KeyError(f"no row has column {name!r}")
        values = self._values[name]
        absent = [row for row in rows if row not in values]
        if absent:
            raise KeyError(f"rows {absent} have no column {name!r}")
        chosen = [values[row] for row in rows]
        return Ragged.from_arrays(chosen) if name in self._ragged else np.array(chosen)


def _kind(value: Array, *, ragged: bool) -> tuple[bool, object, tuple[int, ...]]:
    """What all values of a column have in common."""
    return ragged, value.dtype, value.shape[ragged:]
