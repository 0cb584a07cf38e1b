"""Values in the memory of the storage unit's process.

Invariant: rows pin at most twice their own bytes. Rows of one message come and go one by one, so what is small is
copied out of it, and what is large is kept only while most of it is there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from headrace.contract import Batch, Column, Storage, StorageStats
from headrace_storage.blocks import Block, Blocks, runs, values
from headrace_storage.columns import Kind, check, kind_of, nothing

Names = frozenset[str]
"""Of columns that were put together."""


class _Known:
    """A column that some row has."""

    def __init__(self, kind: Kind) -> None:
        self.kind = kind
        self.among: tuple[Blocks, ...] = ()
        """Where rows with it are: as many as there are sets of columns with which it was put together."""


class MemoryStorage(Storage):
    """The first row of a column sets its layout, dtype and value shape; ContractError for a row that differs. A column
    without rows is forgotten."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._blocks: dict[Names, Blocks] = {}
        self._columns: dict[str, _Known] = {}
        self._rows: set[int] = set()
        self._nbytes = 0

    def put(self, batch: Batch) -> int:
        rows = check(batch, self._columns)
        if not rows or not batch.columns:
            return 0
        if not self._rows.isdisjoint(rows):
            self._give_up(rows, frozenset(batch.columns))
        self._rows.update(rows)
        return self._keep(rows, batch.columns)

    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        together: dict[tuple[Blocks, ...], list[str]] = {}
        for name in columns:
            known = self._columns.get(name)
            if known is None:
                raise KeyError(f"no row has column {name!r}; columns are {sorted(self._columns)}")
            together.setdefault(known.among, []).append(name)
        found: dict[str, Column] = {}
        for among, names in together.items():
            found |= self._read(rows, names, among)
        return Batch(rows=np.asarray(rows, dtype=np.int64), columns={name: found[name] for name in columns})

    def delete(self, rows: Sequence[int]) -> None:
        known = [row for row in dict.fromkeys(rows) if row in self._rows]
        self._rows.difference_update(known)
        for names, blocks in list(self._blocks.items()):
            self._drop(blocks.among(known), names)

    def stats(self) -> StorageStats:
        return StorageStats(rows=len(self._rows), nbytes=self._nbytes)

    def close(self) -> None:
        self._blocks.clear()
        self._columns.clear()
        self._rows.clear()
        self._nbytes = 0

    def _keep(self, rows: list[int], columns: Mapping[str, Column]) -> int:
        names = frozenset(columns)
        blocks = self._blocks.get(names)
        if blocks is None:
            blocks = self._blocks[names] = Blocks()
            for name, column in columns.items():
                self._columns.setdefault(name, _Known(kind_of(column))).among += (blocks,)
        nbytes = blocks.put(rows, columns)
        self._nbytes += nbytes
        return nbytes

    def _give_up(self, rows: Sequence[int], replaced: Names) -> None:
        """Others take the place of what ``rows`` have of these columns."""
        for names, blocks in list(self._blocks.items()):
            old = [] if names.isdisjoint(replaced) else blocks.among(rows)
            if old:
                rest = self._read(old, sorted(names - replaced), (blocks,))
                self._drop(old, names)
                if rest:
                    self._keep(old, rest)

    def _drop(self, rows: Sequence[int], names: Names) -> None:
        """Rows whose columns with these names were put together."""
        blocks = self._blocks[names]
        self._nbytes -= blocks.delete(rows)
        if not len(blocks):
            del self._blocks[names]
            for name in names:
                known = self._columns[name]
                known.among = tuple(others for others in known.among if others is not blocks)
                if not known.among:
                    del self._columns[name]

    def _read(self, rows: Sequence[int], names: Sequence[str], among: Sequence[Blocks]) -> dict[str, Column]:
        """Columns that were put together wherever they were put."""
        if not rows:
            return {name: nothing(self._columns[name].kind) for name in names}
        try:
            found = runs(rows, among[0].at if len(among) == 1 else partial(_at, among))
        except KeyError as error:
            raise KeyError(f"row {error.args[0]} has no column {names[0]!r}") from None
        return {name: values(name, found) for name in names}


def _at(among: Sequence[Blocks], row: int) -> Block:
    for blocks in among:
        if row in blocks:
            return blocks.at(row)
    raise KeyError(row)
