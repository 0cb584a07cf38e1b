"""The ledger: readiness, leases, exactly-once, bytes."""

from __future__ import annotations

import tracemalloc
from collections import Counter
from collections.abc import Collection
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flow.group_table import WRITTEN
from headrace.flow.ledger import Ledger
from headrace.flow.table import FIRST_CAPACITY, Table


def ledger(group_size: int = 2, first_group: int = 0) -> Ledger:
    return Ledger(
        group_size=group_size,
        columns=("tokens", "reward", "reference"),
        consumers={"reference": ("tokens",), "train": ("tokens", "reward", "reference")},
        first_group=first_group,
    )


def write(
    book: Ledger, row: int, columns: Collection[str], *, nbytes: int = 1, tokens: int = 0, version: int | None = None
) -> str:
    versions = None if version is None else np.array([version])
    return WRITTEN[int(book.write(np.array([row]), columns, nbytes=nbytes, tokens=tokens, versions=versions)[0])]


def test_a_group_is_ready_only_when_every_member_has_all_the_columns_the_consumer_reads() -> None:
    book = ledger()
    group = book.open(version=3)
    assert write(book, 0, ("tokens",), nbytes=8, tokens=5) == "stored"
    assert write(book, 0, ("reward", "reference"), nbytes=8) == "stored"
    assert book.ready("train") == book.ready("reference") == {}
    assert write(book, 1, ("tokens",), nbytes=8, tokens=7) == "stored"
    assert (book.ready("train"), book.ready("reference")) == ({}, {3: 1})
    assert not book.is_complete(group)
    assert write(book, 1, ("reward",), nbytes=8) == "stored"
    assert book.ready("train") == {}
    assert write(book, 1, ("reference",), nbytes=8) == "stored"
    assert book.ready("train") == {3: 1}
    assert book.is_complete(group)
    assert book.tokens(group) == [5, 7]


def test_a_column_that_nobody_asked_for_delays_nobody() -> None:
    book = ledger(group_size=1)
    book.open(version=0)
    write(book, 0, ("tokens",), nbytes=1)
    assert book.lease("reference", 1, deadline=1.0) is not None
    assert book.lease("train", 1, deadline=1.0) is None


def test_consumers_do_not_see_each_other() -> None:
    book = ledger(group_size=1)
    book.open(version=0)
    write(book, 0, ("tokens", "reward", "reference"), nbytes=1)
    reference = book.lease("reference", 1, deadline=1.0)
    train = book.lease("train", 1, deadline=1.0)
    assert reference is not None
    assert train is not None
    book.acknowledge(reference.lease)
    assert book.is_open(0)
    book.acknowledge(train.lease)
    assert not book.is_open(0)


def test_oldest_version_first_then_first_ready_first() -> None:
    book = ledger(group_size=1)
    for version in (5, 4, 5, 3):
        write(book, book.open(version), ("tokens",), nbytes=1)
    lease = book.lease("reference", 3, deadline=1.0)
    assert lease is not None
    assert lease.groups.tolist() == [3, 1, 0]


def test_the_version_of_a_group_is_that_of_its_oldest_token() -> None:
    book = ledger(group_size=2)
    book.open(version=4)
    write(book, 0, ("tokens",), nbytes=1, version=5)
    write(book, 1, ("tokens",), nbytes=1, version=6)
    assert book.ready("reference") == {5: 1}


@pytest.mark.parametrize("versions", [(3, 5), (5, 3)])
def test_the_version_of_a_group_whose_rows_come_one_by_one_is_that_of_the_oldest(versions: tuple[int, int]) -> None:
    book = ledger()
    group = book.open(version=9)
    for row, version in enumerate(versions):
        book.write_row(row, ("tokens",), nbytes=1, version=version)
    assert book.oldest(np.array([group])) == [3]
    assert book.ready("reference") == {3: 1}


def test_rows_of_a_lease_that_ran_out_are_ready_again() -> None:
    book = ledger(group_size=1)
    write(book, book.open(version=2), ("tokens",), nbytes=1)
    first = book.lease("reference", 1, deadline=10.0)
    assert first is not None
    assert book.ready("reference") == {}
    assert book.expire(9.9) == ()
    book.extend(first.lease, deadline=20.0)
    assert book.expire(19.9) == ()
    assert [lease.groups.tolist() for lease in book.expire(20.0)] == [[0]]
    assert book.ready("reference") == {2: 1}
    with pytest.raises(ValueError, match="not held"):
        book.acknowledge(first.lease)
    with pytest.raises(ValueError, match="not held"):
        book.extend(first.lease, deadline=30.0)


def test_what_several_leases_held_comes_back_in_its_order_when_they_run_out() -> None:
    book = ledger(group_size=1)
    for row in range(5):
        book.open(version=0)
        write(book, row, ("tokens",), nbytes=1)
    for number in range(2):
        lease = book.lease("reference", 2, deadline=5.0)
        assert lease is not None
        book.extend(number, deadline=5.0)
    assert [lease.lease for lease in book.expire(5.0)] == [0, 1]
    again = book.lease("reference", 5, deadline=9.0)
    assert again is not None
    assert again.groups.tolist() == [0, 1, 2, 3, 4]


def test_a_dropped_group_is_never_leased() -> None:
    book = ledger(group_size=1)
    for version in (0, 0, 1):
        write(book, book.open(version), ("tokens",), nbytes=1)
    assert book.drop(0) == 1
    lease = book.lease("reference", 2, deadline=1.0)
    assert lease is not None
    assert lease.groups.tolist() == [1, 2]
    assert book.drop(1) == 1, "also while it is on lease"
    _, left = book.acknowledge(lease.lease)
    assert left.tolist() == []


def test_a_write_is_refused_whole_and_named() -> None:
    book = ledger(group_size=2, first_group=5)
    group = book.open(version=0)
    assert group == 5
    assert write(book, 10, ("tokens",), nbytes=1) == "stored"
    assert write(book, 10, ("reward", "tokens"), nbytes=1) == "duplicate"
    assert write(book, 10, ("reward",), nbytes=1) == "stored"
    assert write(book, 9, ("tokens",), nbytes=1) == "unknown"
    assert write(book, 12, ("tokens",), nbytes=1) == "unknown"
    book.drop(group)
    assert write(book, 11, ("tokens",), nbytes=1) == "late"
    assert (book.nbytes, book.buffered) == (0, 0)


def test_bytes_and_rows_are_counted_until_the_group_leaves() -> None:
    book = ledger(group_size=2)
    book.open(version=0)
    write(book, 0, ("tokens", "reward", "reference"), nbytes=100)
    write(book, 1, ("tokens",), nbytes=50)
    write(book, 1, ("reward", "reference"), nbytes=5)
    assert (book.nbytes, book.buffered) == (155, 2)
    for consumer in ("reference", "train"):
        assert book.buffered == 2
        lease = book.lease(consumer, 1, deadline=1.0)
        assert lease is not None
        book.acknowledge(lease.lease)
    assert (book.nbytes, book.buffered) == (0, 0)


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**32), group_size=st.integers(1, 3), groups=st.integers(1, 12))
def test_each_task_gets_each_row_exactly_once_and_complete(seed: int, group_size: int, groups: int) -> None:
    random, book = Random(seed), ledger(group_size)
    waiting = [
        (row, column)
        for _ in range(groups)
        for row in book.rows(book.open(random.randrange(3)))
        for column in ("tokens", "reward", "reference")
    ]
    random.shuffle(waiting)
    written: set[tuple[int, str]] = set()
    reads = {"reference": ("tokens",), "train": ("tokens", "reward", "reference")}
    seen: dict[str, Counter[int]] = {consumer: Counter() for consumer in reads}
    while waiting or any(sum(counter.values()) < groups for counter in seen.values()):
        if waiting:
            row, column = waiting.pop()
            assert write(book, row, (column,), nbytes=1) == "stored"
            written.add((row, column))
        consumer = random.choice(sorted(reads))
        lease = book.lease(consumer, 1, deadline=0.0)
        if lease is None:
            continue
        for group in lease.groups.tolist():
            assert all((row, column) in written for row in book.rows(group) for column in reads[consumer])
        if random.random() < 0.3:
            book.release(lease.lease)
        else:
            book.acknowledge(lease.lease)
            seen[consumer].update(lease.groups.tolist())
    assert all(counter == Counter(range(groups)) for counter in seen.values())
    assert (book.nbytes, book.buffered) == (0, 0)
    assert list(book.open_groups()) == []


def test_a_long_run_needs_no_more_memory_than_a_short_one() -> None:
    book = ledger(group_size=1000)
    tracemalloc.start()
    try:
        for _ in range(2000):
            group = book.open(version=0)
            write(book, book.rows(group)[7], ("tokens",), nbytes=1)
            book.drop(group)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 6_000_000, "2000 groups of 1000 rows at 24 bytes are 48 MB"


def test_a_table_is_as_large_as_what_is_remembered() -> None:
    table = Table({"value": (np.int64, (2,))}, first=7)
    for record in range(7, 5000):
        assert table.append() == record
        assert table.get("value", record).tolist() == [0, 0]
        table.set("value", record, (record, -record))
        table.forget(record - 20)
        assert all(table.get("value", kept).tolist() == [kept, -kept] for kept in range(table.low, table.end))
    assert table.get("value", 4999).base.shape[0] <= 2 * FIRST_CAPACITY
    assert 4979 in table
    assert 4978 not in table


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("members", [1, 2])
def test_records_of_a_table_can_be_copies_of_another(count: int, members: int) -> None:
    table = Table(
        {"a": (np.int64, ()), "b": (np.int8, (2,))}, of_members={"c": (np.int16, ())}, members=members, first=0
    )
    table.append()
    like = table.fresh(a=7, b=[1, 2], c=3)
    first = table.append(count, like)
    table.append()
    assert table.columns["a"][: count + 2].tolist() == [0, *[7] * count, 0]
    assert table.columns["b"][first : first + count].tolist() == [[1, 2]] * count
    assert table.columns["c"][first : first + count].tolist() == [[3] * members] * count
    assert table.members["c"][: members * (count + 2)].tolist() == [0] * members + [3] * members * count + [0] * members
    table.part("b", 1)[first] = 9
    assert table.get("b", first).tolist() == [1, 9]


def test_a_lease_of_less_than_nothing_is_refused_and_takes_nothing() -> None:
    book = Ledger(group_size=1, columns=("a",), consumers={"x": ("a",)})
    book.insert(1, 0, ("a",), nbytes=1)
    with pytest.raises(ValueError, match="-1 groups"):
        book.lease("x", -1, deadline=1.0)
    assert book.ready("x") == {0: 1}


def test_a_record_is_moved_rarely_though_nearly_all_room_is_taken_by_what_is_remembered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    moves, move = [], Table._make_room
    monkeypatch.setattr(Table, "_make_room", lambda table, count: (moves.append(count), move(table, count)))
    table = Table({"count": (np.int64, ())}, first=5)
    table.append(FIRST_CAPACITY - 1)
    for _ in range(100 * FIRST_CAPACITY):
        record = table.append()
        table.set("count", record, record)
        table.forget(table.low + 1)
    assert len(moves) <= 100
    newest = np.arange(table.end - 5, table.end)
    assert table.columns["count"][table.slots(newest)].tolist() == newest.tolist()


def test_what_comes_after_all_was_forgotten_is_remembered() -> None:
    table = Table({"count": (np.int64, ())}, first=5)
    table.append(3)
    table.forget(1000)
    record = table.append()
    assert record == 8
    assert record in table
    assert 7 not in table
