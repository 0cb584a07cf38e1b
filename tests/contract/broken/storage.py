"""Storages that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from headrace.contract import Array, Batch, Column, Ragged, Storage, StorageStats
from headrace.testing import FakeStorage
from headrace.testing.suites import StorageContract


class Broken(StorageContract):
    """Subclasses say which storage."""

    Kind: type[FakeStorage]

    @pytest.fixture
    def plugin(self) -> Storage:
        return self.Kind(FakeStorage.Settings())


class TestSorts(Broken):
    breaks = "test_rows_come_back_in_the_order_they_are_asked_for"

    class Kind(FakeStorage):
        def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
            return super().get(sorted(rows), columns)


class TestCountsFromZeroOn(Broken):
    breaks = "test_ids_below_zero_are_ids"

    class Kind(FakeStorage):
        def put(self, batch: Batch) -> int:
            return super().put(batch.take(np.flatnonzero(batch.rows >= 0)))


class TestPads(Broken):
    breaks = "test_ragged_rows_keep_their_lengths"

    class Kind(FakeStorage):
        def put(self, batch: Batch) -> int:
            column = batch.columns.get("tokens")
            if isinstance(column, Ragged) and 0 in column.lengths:
                batch = batch.with_columns({"tokens": Ragged.from_arrays([np.resize(row, 3) for row in column])})
            return super().put(batch)


class TestWidens(Broken):
    breaks = "test_values_keep_their_dtype_shape_and_bits"

    class Kind(FakeStorage):
        def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
            got = super().get(rows, columns)
            return got.with_columns({n: c.astype(np.float32) for n, c in got.columns.items() if n == "half"})  # type: ignore[union-attr]  # it is dense


class TestGivesAll(Broken):
    breaks = "test_only_the_requested_columns_come_back"

    class Kind(FakeStorage):
        def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
            known = [name for name in self._values if columns == ["reward"] and name not in columns]
            return super().get(rows, [*columns, *known])


class TestForgetsOtherColumns(Broken):
    breaks = "test_a_put_of_some_columns_keeps_the_others"

    class Kind(FakeStorage):
        def put(self, batch: Batch) -> int:
            self.delete(batch.rows.tolist())
            return super().put(batch)


class TestCountsTwice(Broken):
    breaks = "test_a_repeated_put_changes_nothing"

    class Kind(FakeStorage):
        nbytes = 0
        last = 0

        def put(self, batch: Batch) -> int:
            before = super().stats().nbytes
            stored = super().put(batch)
            self.nbytes += stored - (super().stats().nbytes - before)
            return stored

        def stats(self) -> StorageStats:
            stats = super().stats()
            return replace(stats, nbytes=stats.nbytes + self.nbytes)


class TestKeepsTheFirst(Broken):
    breaks = "test_a_later_put_replaces_the_value"

    class Kind(FakeStorage):
        def put(self, batch: Batch) -> int:
            stored = {row for values in self._values.values() for row in values}
            fresh = [i for i, row in enumerate(batch.rows.tolist()) if row not in stored or len(batch.columns) == 1]
            return super().put(batch.take(fresh))


class TestTakesWhatDoesNotFit(Broken):
    breaks = "test_a_put_that_does_not_fit_stores_nothing"

    class Kind(FakeStorage):
        def _check(self, batch: Batch) -> None:
            pass


class TestHidesTheRow(Broken):
    breaks = "test_an_absent_row_is_named"

    class Kind(FakeStorage):
        def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
            if any(name in self._values and not set(rows) <= set(self._values[name]) for name in columns):
                raise KeyError("something is missing")
            return super().get(rows, columns)


class TestHidesTheColumn(Broken):
    breaks = "test_an_absent_column_is_named"

    class Kind(FakeStorage):
        def _column(self, name: str, rows: Sequence[int]) -> Column:
            return super()._column(name, rows) if name in self._values else np.zeros(len(rows))


class TestCountsRowsAsBytes(Broken):
    breaks = "test_put_and_stats_tell_rows_and_bytes"

    class Kind(FakeStorage):
        def put(self, batch: Batch) -> int:
            super().put(batch)
            return len(batch)


class TestNeverFrees(Broken):
    breaks = "test_deleted_rows_are_gone_and_their_bytes_free"

    class Kind(FakeStorage):
        freed = 0

        def delete(self, rows: Sequence[int]) -> None:
            before = super().stats().nbytes
            super().delete(rows)
            self.freed += before - super().stats().nbytes

        def stats(self) -> StorageStats:
            stats = super().stats()
            return replace(stats, nbytes=stats.nbytes + self.freed)


class TestMindsUnknownRows(Broken):
    breaks = "test_deleting_unknown_rows_is_ignored"

    class Kind(FakeStorage):
        def delete(self, rows: Sequence[int]) -> None:
            if not any(set(rows) <= set(values) for values in self._values.values()):
                raise KeyError("unknown rows")
            super().delete(rows)


class TestKeepsViews(Broken):
    breaks = "test_a_view_does_not_pin_the_array_it_shows"

    class Kind(FakeStorage):
        def __init__(self, settings: FakeStorage.Settings) -> None:
            super().__init__(settings)
            self.kept: list[Array] = []

        def put(self, batch: Batch) -> int:
            self.kept += [c.values if isinstance(c, Ragged) else c for c in batch.columns.values()]
            return super().put(batch)


class TestClosesOnce(Broken):
    breaks = "test_close_may_be_called_twice"

    class Kind(FakeStorage):
        closed = False

        def close(self) -> None:
            if self.closed:
                raise ValueError("closed already")
            self.closed = True
