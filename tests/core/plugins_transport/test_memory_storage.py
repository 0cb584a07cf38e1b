from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import settings

from headrace.contract import Batch, Column, NoSettings, Ragged
from headrace.errors import ContractError
from headrace_storage.memory import MemoryStorage
from support.storing import Storing


@pytest.fixture
def storage() -> Iterator[MemoryStorage]:
    storage = MemoryStorage(NoSettings())
    yield storage
    storage.close()
    storage.close()


def batch(rows: list[int], **columns: Column) -> Batch:
    return Batch(rows=np.array(rows, np.int64), columns=columns)


def ragged(*arrays: list[int]) -> Ragged:
    return Ragged.from_arrays([np.array(a, np.int32) for a in arrays])


@pytest.mark.parametrize(
    ("rows", "columns", "text"),
    [
        ([1, 7], ["reward"], "row 7 has no column 'reward'"),
        ([1, 2], ["tokens"], "row 2 has no column 'tokens'"),
        ([1], ["absent"], "no row has column 'absent'; columns are"),
    ],
)
def test_an_absent_row_or_column_is_named(
    storage: MemoryStorage, rows: list[int], columns: list[str], text: str
) -> None:
    storage.put(batch([1], tokens=ragged([1])))
    storage.put(batch([1, 2], reward=np.zeros(2)))
    with pytest.raises(KeyError, match=text):
        storage.get(rows, columns)


def test_what_is_put_and_what_is_got_can_be_changed_without_changing_what_is_stored(storage: MemoryStorage) -> None:
    tokens, reward = ragged([1, 2], [3]), np.array([1.0, 2.0])
    storage.put(batch([1, 2], tokens=tokens, reward=reward))
    tokens.values[:] = 0
    reward[:] = 0
    first = storage.get([1, 2], ["tokens", "reward"])
    first.ragged("tokens").values[:] = 9
    first.dense("reward")[:] = 9
    again = storage.get([1, 2], ["tokens", "reward"])
    assert again.ragged("tokens").values.tolist() == [1, 2, 3]
    assert again.dense("reward").tolist() == [1, 2]


@pytest.mark.parametrize(
    ("column", "text"),
    [
        (np.zeros(1), "column 'reward' is dense float32 .*, a put gave dense float64"),
        (np.zeros((1, 2), np.float32), r"a put gave dense float32 \[2\]"),
        (Ragged.from_arrays([np.zeros(1, np.float32)]), "a put gave ragged float32"),
    ],
)
def test_a_column_does_not_change_its_kind_and_the_refused_put_stores_nothing(
    storage: MemoryStorage, column: Column, text: str
) -> None:
    storage.put(batch([1], reward=np.ones(1, np.float32)))
    before = storage.stats()
    with pytest.raises(ContractError, match=text):
        storage.put(batch([2], tokens=ragged([1]), reward=column))
    assert storage.stats() == before
    with pytest.raises(KeyError):
        storage.get([2], ["tokens"])
    storage.delete([1])
    storage.put(batch([1], reward=column))


def test_values_without_bytes_are_kept_and_rows_of_entries_without_bytes_are_refused(storage: MemoryStorage) -> None:
    storage.put(batch([1, 2], nothing=np.zeros((2, 0))))
    assert storage.get([2, 1], ["nothing"]).dense("nothing").shape == (2, 0)
    with pytest.raises(ContractError, match="have no bytes"):
        storage.put(batch([1], empty=Ragged(np.zeros((3, 0)), np.array([0, 3]))))


def test_a_row_twice_in_one_put_is_a_contract_error(storage: MemoryStorage) -> None:
    with pytest.raises(ContractError, match="names a row twice"):
        storage.put(batch([1, 1], reward=np.zeros(2)))


def test_one_row_left_of_a_large_put_pins_only_its_own_memory(storage: MemoryStorage) -> None:
    rows, length = 256, 1 << 14
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        storage.put(
            batch(
                list(range(rows)),
                tokens=Ragged(np.ones(rows * length, np.uint8), np.arange(rows + 1) * length),
                image=np.ones((rows, length), np.uint8),
            )
        )
        assert tracemalloc.get_traced_memory()[0] - start > 2 * rows * length
        storage.delete(list(range(1, rows)))
        assert storage.stats().nbytes == 2 * length
        kept = tracemalloc.get_traced_memory()[0] - start
        assert kept < rows * length / 3, f"{kept} bytes are held for {2 * length}"
    finally:
        tracemalloc.stop()


def test_one_row_left_of_each_of_many_small_puts_pins_little_more_than_its_own_memory(storage: MemoryStorage) -> None:
    puts, rows, length = 100, 12, 4096
    tracemalloc.start()
    try:
        start = tracemalloc.get_traced_memory()[0]
        for put in range(puts):
            values = np.ones((rows, length), np.uint8)
            storage.put(batch([put * rows + row for row in range(rows)], image=values))
        storage.delete([row for row in range(puts * rows) if row % rows])
        assert storage.stats().nbytes == puts * length
        kept = tracemalloc.get_traced_memory()[0] - start
        assert kept < puts * rows * length / 3, f"{kept} bytes are held for {puts * length}"
        assert storage.get([0, rows], ["image"]).dense("image").tolist() == [[1] * length] * 2
    finally:
        tracemalloc.stop()


class StoringInMemory(Storing):
    def make(self) -> MemoryStorage:
        return MemoryStorage(NoSettings())


test_the_storage_is_a_dictionary_of_row_and_column = StoringInMemory.TestCase
test_the_storage_is_a_dictionary_of_row_and_column.settings = settings(max_examples=25, stateful_step_count=15)
