"""Put, lease, get, acknowledge, through sockets."""

from __future__ import annotations

import threading
from collections import Counter
from concurrent.futures import Future, ThreadPoolExecutor, as_completed

import numpy as np
import pytest

from headrace.contract import Array, Ragged
from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec, Rows
from headrace.errors import ContractError, DeadlineError, LostRowsError, RunError
from support.data_plane import Services, soon

COLUMNS = {
    "tokens": ColumnSchema("int32", ragged=True),
    "reward": ColumnSchema("float32"),
    "reference": ColumnSchema("float32", ragged=True),
}
CONSUMERS: dict[str, tuple[str, ...]] = {"reference": ("tokens",), "train": ("tokens", "reward", "reference")}


def spec(group_size: int = 1, name: str = "phase") -> PartitionSpec:
    return PartitionSpec(name, COLUMNS, CONSUMERS, group_size, "tokens")


def tokens(lengths: list[int]) -> Ragged:
    return Ragged.from_arrays([np.arange(length, dtype=np.int32) for length in lengths], dtype=np.int32)


def rewards(count: int) -> Array:
    return np.arange(count, dtype=np.float32)


def put(partition: Partition, count: int, *, version: int = 0) -> Array:
    """Rows that are complete but for ``reference``."""
    return partition.put({"tokens": tokens([3] * count), "reward": rewards(count)}, version=version)


@pytest.fixture
def partition(services: Services) -> Partition:
    services.unit()
    return services.plane().create(spec())


def test_what_was_put_is_what_a_consumer_gets(partition: Partition) -> None:
    lengths = [5, 0, 2]
    rows = partition.put({"tokens": tokens(lengths), "reward": rewards(3)})
    held = partition.lease("reference", 3)
    assert held.rows.tolist() == rows.tolist()
    assert held.tokens.tolist() == lengths
    batch = partition.get(held)
    assert list(batch.columns) == ["tokens"], "no column travels that was not asked for"
    assert [part.tolist() for part in batch.ragged("tokens")] == [[0, 1, 2, 3, 4], [], [0, 1]]
    assert batch.ragged("tokens").values.nbytes == 4 * sum(lengths), "ragged values have no padding"


def test_a_row_is_offered_when_its_last_column_is_there(partition: Partition) -> None:
    rows = put(partition, 2)
    with pytest.raises(DeadlineError, match=r"no 1 groups of partition 'phase' for train within 0\.05 s"):
        partition.lease("train", 1, deadline=0.05)
    partition.put({"reference": tokens([3]).like(np.zeros(3, np.float32))}, rows=rows[1:])
    held = partition.lease("train", 1)
    assert held.rows.tolist() == rows[1:].tolist()
    assert set(partition.get(held).columns) == {"tokens", "reward", "reference"}


def test_a_consumer_that_waits_is_woken_by_the_write_that_completes_its_rows(
    services: Services, partition: Partition
) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(lease_alone, services, "reference", 2)
        until_waiting(partition, "reference", 1)
        put(partition, 1)
        assert not waiting.done()
        put(partition, 1)
        assert len(waiting.result(30)) == 2


def test_one_that_waits_for_much_does_not_hold_up_one_that_waits_for_little(
    services: Services, partition: Partition
) -> None:
    with ThreadPoolExecutor() as pool:
        much = pool.submit(lease_alone, services, "reference", 3)
        until_waiting(partition, "reference", 1)
        little = pool.submit(lease_alone, services, "reference", 1)
        until_waiting(partition, "reference", 2)
        put(partition, 1)
        assert len(little.result(30)) == 1
        put(partition, 3)
        assert len(much.result(30)) == 3


def test_one_that_gave_up_waiting_takes_nothing(services: Services, partition: Partition) -> None:
    impatient = services.plane().partition("phase")
    with pytest.raises(DeadlineError):
        impatient.lease("reference", 1, deadline=0.05)
    rows = put(partition, 1)
    assert partition.lease("reference", 1).rows.tolist() == rows.tolist()


def lease_alone(services: Services, consumer: str, groups: int) -> Rows:
    return services.plane().partition("phase").lease(consumer, groups)


def until_waiting(partition: Partition, consumer: str, count: int) -> None:
    soon(lambda: partition.stats().waiting[consumer] == count)


def test_consumers_do_not_see_each_other_and_rows_leave_with_the_last(partition: Partition) -> None:
    rows = put(partition, 4)
    held = partition.lease("reference", 4)
    partition.put({"reference": tokens([3] * 4).like(np.zeros(12, np.float32))}, rows=rows)
    trained = partition.lease("train", 4)
    partition.acknowledge(held)
    assert partition.stats().rows == 4
    partition.acknowledge(trained)
    assert (partition.stats().rows, partition.stats().nbytes) == (0, 0)
    until_empty(partition)


def until_empty(partition: Partition) -> None:
    soon(lambda: not any(stats.rows or stats.nbytes for stats in partition.unit_stats()))


def test_groups_are_given_whole_and_the_oldest_version_first(services: Services) -> None:
    services.unit()
    partition = services.plane().create(spec(group_size=3))
    newer, older = put(partition, 6, version=5), put(partition, 3, version=4)
    assert partition.lease("reference", 2).rows.tolist() == [*older.tolist(), *newer[:3].tolist()]
    with pytest.raises(ContractError, match="4 new rows are no whole groups of 3"):
        put(partition, 4)


def test_rows_of_a_consumer_that_is_gone_are_given_to_another_and_its_late_word_is_refused(
    partition: Partition,
) -> None:
    rows = put(partition, 1)
    lost = partition.lease("reference", 1, seconds=0.01)
    again = partition.lease("reference", 1)
    assert again.rows.tolist() == rows.tolist()
    assert (lost.attempts.tolist(), again.attempts.tolist()) == ([1], [2])
    with pytest.raises(RunError, match="not held"):
        partition.acknowledge(lost)
    partition.acknowledge(again)


def test_released_rows_come_first(partition: Partition) -> None:
    first = put(partition, 2)
    held = partition.lease("reference", 1)
    partition.extend(held, 100.0)
    partition.release(held)
    assert partition.lease("reference", 1).rows.tolist() == first[:1].tolist()


def test_dropped_groups_are_given_to_nobody(partition: Partition) -> None:
    rows = put(partition, 3)
    partition.drop(rows[:2].tolist())
    held = partition.lease("reference", 3, at_least=1)
    assert held.rows.tolist() == rows[2:].tolist()
    assert partition.try_put({"reward": rewards(1)}, rows=rows[:1]).refused.tolist() == [2]


@pytest.mark.parametrize(
    ("columns", "said"),
    [
        ({"reward": np.zeros(2, np.float64)}, "is dense float32 [], a put gave dense float64 []"),
        ({"reward": np.zeros((2, 3), np.float32)}, "a put gave dense float32 [3]"),
        ({"tokens": np.zeros(2, np.int32)}, "is ragged int32 [], a put gave dense int32 []"),
        ({"rewards": np.zeros(2, np.float32)}, "does not exist"),
        ({"reward": np.zeros(2, np.float32), "tokens": Ragged(np.zeros(0, np.int32), np.zeros(4, np.int64))}, "rows"),
        ({}, "without columns"),
    ],
)
def test_a_put_that_is_not_what_the_schema_says_is_refused_and_nothing_of_it_is_kept(
    partition: Partition, columns: dict[str, Array | Ragged], said: str
) -> None:
    with pytest.raises(ContractError) as caught:
        partition.put(columns)
    assert said in str(caught.value)
    assert partition.stats().rows == 0
    put(partition, 1)


def test_a_column_is_written_once(partition: Partition) -> None:
    rows = put(partition, 2)
    noted = partition.try_put({"reward": rewards(2) + 7}, rows=rows)
    assert noted.refused.tolist() == [1, 1]
    held = partition.lease("reference", 2)
    assert partition.get(held, ["tokens"]).rows.tolist() == rows.tolist()


def test_a_full_unit_keeps_new_rows_waiting_but_never_what_lets_rows_leave(services: Services) -> None:
    one_row = 3 * 4 + 4
    services.unit(capacity=2 * one_row)
    partition = services.plane().create(spec())
    rows = put(partition, 2)
    with ThreadPoolExecutor() as pool:
        blocked = pool.submit(put_alone, services)
        with pytest.raises(DeadlineError):
            services.plane().partition("phase").put({"reward": rewards(1)}, deadline=0.05)
        assert not blocked.done()
        partition.put({"reference": tokens([3] * 2).like(np.zeros(6, np.float32))}, rows=rows)
        for consumer in CONSUMERS:
            partition.acknowledge(partition.lease(consumer, 2))
        assert len(blocked.result(30)) == 1
    with pytest.raises(RunError, match="can never fit"):
        put(partition, 3)


def put_alone(services: Services) -> Array:
    return put(services.plane().partition("phase"), 1)


def test_columns_of_a_row_may_live_in_different_units_and_come_back_in_order(services: Services) -> None:
    services.unit()
    services.unit()
    partition = services.plane().create(spec())
    rows = np.concatenate([put(partition, 1) for _ in range(4)])
    for row in rows[::-1]:
        partition.put({"reference": tokens([2]).like(np.full(2, row, np.float32))}, rows=np.array([row]))
    held = partition.lease("train", 4)
    assert len(np.unique(held.units)) == 2
    batch = partition.get(held)
    assert batch.rows.tolist() == held.rows.tolist() == rows[::-1].tolist(), "first ready, first given"
    assert [part[0] for part in batch.ragged("reference")] == held.rows.tolist()


def test_a_unit_that_joins_later_is_used(services: Services) -> None:
    services.unit()
    early = services.plane().create(spec())
    services.unit()
    late = services.plane().partition("phase")
    put(late, 1)
    put(late, 1)
    assert [stats.rows for stats in late.unit_stats()] == [1, 1]
    held = early.lease("reference", 2)
    assert len(early.get(held)) == 2, "a client learns of units when it meets their rows"


def test_partitions_do_not_mix(services: Services) -> None:
    services.unit()
    plane = services.plane()
    one, other = plane.create(spec()), plane.create(spec(group_size=2, name="other"))
    mine, theirs = put(one, 2), put(other, 2)
    assert not set(mine.tolist()) & set(theirs.tolist())
    assert one.lease("reference", 2).rows.tolist() == mine.tolist()
    assert plane.create(spec()).spec == one.spec
    with pytest.raises(ContractError, match="another partition 'phase'"):
        plane.create(spec(group_size=4))
    with pytest.raises(ContractError, match="no partition 'none'"):
        plane.partition("none")


def test_partitions_may_name_columns_of_different_kinds_alike(services: Services) -> None:
    services.unit()
    plane, reads = services.plane(), {"train": ("tokens",)}
    one, other = plane.create(spec()), plane.create(PartitionSpec("other", {"tokens": ColumnSchema("int64")}, reads))
    one.put({"tokens": tokens([2])})
    other.put({"tokens": np.array([7])})
    assert one.get(one.lease("reference", 1)).ragged("tokens")[0].tolist() == [0, 1]
    assert other.get(other.lease("train", 1)).dense("tokens").tolist() == [7]


def test_every_consumer_gets_every_row_exactly_once_however_many_share_the_work(services: Services) -> None:
    services.unit()
    services.unit()
    services.plane().create(spec(group_size=2))
    producers, workers, groups = 3, 2, 40
    seen: dict[str, Counter[int]] = {consumer: Counter() for consumer in CONSUMERS}
    lock, failed = threading.Lock(), threading.Event()

    def produce() -> None:
        partition = services.plane().partition("phase")
        for _ in range(groups):
            put(partition, 2)

    def consume(consumer: str) -> None:
        partition = services.plane().partition("phase")
        while True:
            with lock:
                if failed.is_set() or sum(seen[consumer].values()) == 2 * producers * groups:
                    return
            try:
                held = partition.lease(consumer, 5, at_least=1, deadline=0.2)
            except DeadlineError:
                continue
            batch = partition.get(held)
            if consumer == "reference":
                values = batch.ragged("tokens")
                partition.put({"reference": values.like(values.values.astype(np.float32))}, rows=batch.rows)
            partition.acknowledge(held)
            with lock:
                seen[consumer].update(held.rows.tolist())

    with ThreadPoolExecutor() as pool:
        work: list[Future[None]] = [pool.submit(produce) for _ in range(producers)]
        work += [pool.submit(consume, consumer) for consumer in CONSUMERS for _ in range(workers)]
        for done in as_completed(work, timeout=120):
            if done.exception():
                failed.set()
        assert [done.exception() for done in work] == [None] * len(work)
    for consumer in CONSUMERS:
        assert len(seen[consumer]) == 2 * producers * groups
        assert set(seen[consumer].values()) == {1}
    until_empty(services.plane().partition("phase"))


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are missed soon."""
    monkeypatch.setattr("headrace.dataplane.unit.BEAT_SECONDS", 0.02)
    monkeypatch.setattr("headrace.dataplane.units.SILENT_SECONDS", 0.5)
    monkeypatch.setattr("headrace.dataplane.ledger.WATCH_SECONDS", 0.02)


@pytest.mark.usefixtures("quick")
def test_rows_of_a_unit_that_is_gone_are_named_and_given_to_nobody(services: Services) -> None:
    services.unit()
    services.unit()
    partition = services.plane().create(spec())
    first, second, third = (put(partition, 1) for _ in range(3))
    held = partition.lease("reference", 1)
    assert held.rows.tolist() == first.tolist()
    services.lose_unit(1)
    assert partition.lost(wait=30) == [*first.tolist(), *third.tolist()]
    assert partition.lost() == []
    with pytest.raises(LostRowsError, match="storage unit 1 is gone, and with it what it kept of rows"):
        partition.get(held, deadline=0.05)
    with pytest.raises(LostRowsError, match="made anew"):
        partition.acknowledge(held)
    assert partition.lease("reference", 3, at_least=1).rows.tolist() == second.tolist()
    rows = np.concatenate([put(partition, 1), put(partition, 1)])
    assert partition.lease("reference", 2).rows.tolist() == rows.tolist()
    assert partition.try_put({"reward": rewards(1)}, rows=first).refused.tolist() == [2]


def test_a_unit_that_comes_later_gets_its_share(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    services.unit()
    partition = services.plane().create(spec())
    put(partition, 1)
    services.unit()
    monkeypatch.setattr("headrace.dataplane.unit_clients.LEARN_SECONDS", 0.0)
    for _ in range(3):
        put(partition, 1)
    assert [stats.rows for stats in partition.unit_stats()] == [2, 2]


def test_a_plane_without_a_unit_says_so(services: Services) -> None:
    plane: DataPlane = services.plane()
    with pytest.raises(DeadlineError, match="no storage unit"):
        put(plane.create(spec()), 1)
