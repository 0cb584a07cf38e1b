"""The rules of the ``storage`` role.

class TestMyStorage(StorageContract):
    @pytest.fixture
    def plugin(self) -> Storage:
        return MyStorage(MyStorage.Settings())
"""

from __future__ import annotations

import gc
import weakref

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import Batch, Column, Ragged, Storage
from headrace.errors import ContractError
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, raises, rule


def _batch(rows: list[int], **columns: Column) -> Batch:
    return Batch(rows=np.array(rows, dtype=np.int64), columns=columns)


def _ragged(*arrays: list[int]) -> Ragged:
    return Ragged.from_arrays([np.array(array, dtype=np.int32) for array in arrays], dtype=np.int32)


def _lists(column: Column) -> list[object]:
    return [value.tolist() for value in column]


class StorageContract(PluginContract):
    """Subclass it and override :meth:`plugin`."""

    @pytest.fixture
    def plugin(self) -> Storage:
        """An empty storage; the suite closes it where the rule is about closing."""
        override("plugin", "an empty storage")

    @rule("Rows come back in the order in which `get` asks for them.")
    def test_rows_come_back_in_the_order_they_are_asked_for(self, plugin: Storage) -> None:
        plugin.put(_batch([5, 2, 9], tokens=_ragged([1], [2, 2], [3, 4, 3]), reward=np.array([0.5, 0.25, 1.0])))
        got = plugin.get([9, 5, 2], ["reward", "tokens"])
        found = (got.rows.tolist(), _lists(got.columns["reward"]), _lists(got.columns["tokens"]))
        check(
            found == ([9, 5, 2], [1.0, 0.5, 0.25], [[3, 4, 3], [1], [2, 2]]),
            f"get([9, 5, 2]) gave rows {found[0]} with rewards {found[1]} and tokens {found[2]}",
        )

    @rule("A row's id is any int64: below 0 too, where the data plane keeps what rows share.")
    def test_ids_below_zero_are_ids(self, plugin: Storage) -> None:
        plugin.put(_batch([3, -1], reward=np.array([1.0, 2.0])))
        plugin.put(_batch([-2], reward=np.array([3.0])))
        found = [plugin.get([row], ["reward"]).columns["reward"][0] for row in (3, -1, -2)]
        check(found == [1.0, 2.0, 3.0], f"rewards 1, 2 and 3 of rows 3, -1 and -2 came back as {found}")

    @rule("A ragged column is stored without padding: every row keeps its own length, 0 included.")
    def test_ragged_rows_keep_their_lengths(self, plugin: Storage) -> None:
        plugin.put(_batch([1, 2, 3], tokens=_ragged([7], [], [7, 7, 7])))
        column = plugin.get([1, 2, 3], ["tokens"]).columns["tokens"]
        check(isinstance(column, Ragged), f"a ragged column came back as {type(column).__name__}")
        lengths = [len(value) for value in column]
        check(lengths == [1, 0, 3], f"rows of lengths [1, 0, 3] came back with lengths {lengths}")

    @rule("Values keep their dtype, their shape and every bit.")
    def test_values_keep_their_dtype_shape_and_bits(self, plugin: Storage) -> None:
        columns: dict[str, Column] = {
            "half": np.array([1.5, -2.0], dtype=ml_dtypes.bfloat16),
            "flag": np.array([True, False]),
            "id": np.array([2**62, -1]),
            "image": np.arange(12, dtype=np.float32).reshape(2, 3, 2),
            "experts": Ragged(np.arange(6, dtype=np.float32).reshape(3, 2), np.array([0, 1, 3])),
        }
        plugin.put(_batch([1, 2], **columns))
        got = plugin.get([1, 2], list(columns))
        for name, column in columns.items():
            ours, theirs = (c.values if isinstance(c, Ragged) else c for c in (column, got.columns[name]))
            check(
                (ours.dtype, ours.shape, ours.tobytes()) == (theirs.dtype, theirs.shape, theirs.tobytes()),
                f"column {name} of {ours.dtype} {ours.shape} came back as {theirs.dtype} {theirs.shape}, or changed",
            )

    @rule("`get` gives the columns it was asked for, and no other.")
    def test_only_the_requested_columns_come_back(self, plugin: Storage) -> None:
        plugin.put(_batch([1], tokens=_ragged([1]), reward=np.array([1.0])))
        names = sorted(plugin.get([1], ["reward"]).columns)
        check(names == ["reward"], f"get of ['reward'] gave {names}")

    @rule("A `put` of some columns leaves the rows' other columns as they are.")
    def test_a_put_of_some_columns_keeps_the_others(self, plugin: Storage) -> None:
        plugin.put(_batch([1, 2], tokens=_ragged([1, 2], [3])))
        plugin.put(_batch([1, 2], reward=np.array([5.0, 6.0])))
        tokens = _lists(plugin.get([1, 2], ["tokens"]).columns["tokens"])
        check(tokens == [[1, 2], [3]], f"tokens [[1, 2], [3]] became {tokens} when rewards were put")

    @rule("A `put` that is repeated changes nothing: neither values nor what `stats` counts.")
    def test_a_repeated_put_changes_nothing(self, plugin: Storage) -> None:
        for _ in range(2):
            plugin.put(_batch([1, 2], tokens=_ragged([1, 2], [3]), reward=np.array([1.0, 2.0])))
        stats = plugin.stats()
        check((stats.rows, stats.nbytes) == (2, 28), f"2 rows of 28 bytes, put twice, count as {stats}")

    @rule("A later `put` of the same row and column replaces the value.")
    def test_a_later_put_replaces_the_value(self, plugin: Storage) -> None:
        plugin.put(_batch([1, 2], tokens=_ragged([1, 2], [3]), reward=np.array([1.0, 2.0])))
        plugin.put(_batch([2], tokens=_ragged([4, 5]), reward=np.array([9.0])))
        got = plugin.get([1, 2], ["tokens", "reward"])
        found = (_lists(got.columns["tokens"]), _lists(got.columns["reward"]))
        check(found == ([[1, 2], [4, 5]], [1.0, 9.0]), f"after row 2 was put again, rows hold {found}")

    @rule("A `put` with a row twice, or a column of another dtype or shape, is a ContractError and stores nothing.")
    def test_a_put_that_does_not_fit_stores_nothing(self, plugin: Storage) -> None:
        plugin.put(_batch([1], tokens=_ragged([1, 2]), reward=np.array([1.0])))
        before = plugin.stats()
        for misfit in (
            _batch([2, 2], reward=np.array([1.0, 2.0])),
            _batch([2], reward=np.array([1.0], dtype=np.float32)),
            _batch([2], reward=np.array([[1.0, 2.0]])),
            _batch([2], tokens=Ragged(np.array([3], dtype=np.int64), np.array([0, 1]))),
        ):
            raises(ContractError, lambda misfit=misfit: plugin.put(misfit))  # type: ignore[misc]
        check(plugin.stats() == before, f"puts that were refused made {before} into {plugin.stats()}")

    @rule("`get` of a row that is not there is a KeyError that names the row.")
    def test_an_absent_row_is_named(self, plugin: Storage) -> None:
        plugin.put(_batch([1], reward=np.array([1.0])))
        raises(KeyError, lambda: plugin.get([1, 77], ["reward"]), naming=("77",))

    @rule("`get` of a column that is not there is a KeyError that names the column.")
    def test_an_absent_column_is_named(self, plugin: Storage) -> None:
        plugin.put(_batch([1], reward=np.array([1.0])))
        raises(KeyError, lambda: plugin.get([1], ["nowhere"]), naming=("nowhere",))

    @rule("`put` returns the bytes it stored, and `stats` counts the rows and bytes that are held.")
    def test_put_and_stats_tell_rows_and_bytes(self, plugin: Storage) -> None:
        stored = plugin.put(_batch([1, 2], tokens=_ragged([1, 2], [3]), reward=np.array([1.0, 2.0])))
        check(stored == 28, f"3 int32 and 2 float64 are 28 bytes; put returned {stored}")
        stats = plugin.stats()
        check((stats.rows, stats.nbytes) == (2, 28), f"2 rows of 28 bytes count as {stats}")

    @rule("`delete` frees rows: they are absent afterwards, and their bytes no longer counted.")
    def test_deleted_rows_are_gone_and_their_bytes_free(self, plugin: Storage) -> None:
        plugin.put(_batch([1, 2], tokens=_ragged([1, 2], [3]), reward=np.array([1.0, 2.0])))
        plugin.delete([1])
        raises(KeyError, lambda: plugin.get([1], ["reward"]))
        stats = plugin.stats()
        check((stats.rows, stats.nbytes) == (1, 12), f"1 row of 12 bytes is left of 2 rows; stats says {stats}")

    @rule("`delete` of rows that are not there is ignored.")
    def test_deleting_unknown_rows_is_ignored(self, plugin: Storage) -> None:
        plugin.put(_batch([1], reward=np.array([1.0])))
        plugin.delete([77])
        rewards = _lists(plugin.get([1], ["reward"]).columns["reward"])
        check(rewards == [1.0], f"row 1 holds {rewards} after an unknown row was deleted")

    @rule("A stored value pins its own memory alone: a view of a larger array is copied.")
    def test_a_view_does_not_pin_the_array_it_shows(self, plugin: Storage) -> None:
        large = np.zeros(1 << 16, dtype=np.int32)
        alive = weakref.ref(large)
        plugin.put(_batch([1], tokens=Ragged(large[:3], np.array([0, 3])), reward=large[:1]))
        del large
        if alive() is not None:
            gc.collect()  # unless only a cycle holds it
        check(alive() is None, "the 256 KiB array behind a view of 12 bytes is still in memory")

    @rule("`close` may be called twice.")
    def test_close_may_be_called_twice(self, plugin: Storage) -> None:
        plugin.put(_batch([1], reward=np.array([1.0])))
        plugin.close()
        plugin.close()
