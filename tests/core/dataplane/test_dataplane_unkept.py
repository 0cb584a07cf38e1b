"""A storage that refuses what the ledger has already taken."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from headrace.contract import Array, Batch
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.errors import DeadlineError, LostRowsError, RunError
from headrace_storage.memory import MemoryStorage
from support.data_plane import Services, soon

COLUMNS = {"reward": ColumnSchema("float64"), "score": ColumnSchema("float64")}
SPEC = PartitionSpec("phase", COLUMNS, {"judge": ("reward",), "train": ("reward", "score")}, 2)


class Choosy(MemoryStorage):
    """Refuses negative values."""

    def put(self, batch: Batch) -> int:
        if any((np.asarray(column) < 0).any() for column in batch.columns.values()):
            raise RunError("the disk is full", fix="make room")
        return super().put(batch)


@pytest.fixture
def partition(services: Services) -> Partition:
    services.unit(storage=Choosy(None), capacity=4 * 8)
    return services.plane().create(SPEC)


def test_new_rows_that_cannot_be_kept_are_given_to_nobody_and_fill_nothing(partition: Partition) -> None:
    for _ in range(5):
        with pytest.raises(RunError, match="the disk is full"):
            partition.put({"reward": np.array([1.0, -1.0])})
    soon(lambda: partition.stats().rows == 0)
    assert partition.lost() == [], "its producer knows already"
    kept = partition.put({"reward": np.array([1.0, 2.0, 3.0, 4.0])})
    assert partition.lease("judge", 3, at_least=2).rows.tolist() == kept.tolist()


def test_puts_that_wait_for_room_go_on_when_what_took_it_is_not_kept(services: Services, partition: Partition) -> None:
    with ThreadPoolExecutor() as pool:
        refused = [pool.submit(put_alone, services, -1.0) for _ in range(4)]
        kept = pool.submit(put_alone, services, 1.0).result(30)
        partition.drop(np.unique(kept // 2).tolist())
        assert [type(put.exception(30)) for put in refused] == [RunError] * 4


def put_alone(services: Services, value: float) -> Array:
    return services.plane().partition("phase").put({"reward": np.full(4, value)})


def test_rows_one_of_whose_columns_cannot_be_kept_are_named_to_their_producers(partition: Partition) -> None:
    rows = partition.put({"reward": np.array([1.0, 2.0, 3.0, 4.0])})
    with pytest.raises(RunError, match="the disk is full"):
        partition.put({"score": np.array([0.5, -0.5])}, rows=rows[:2])
    assert partition.lost(wait=30) == [int(rows[0]) // 2]
    assert partition.lease("judge", 2, at_least=1).rows.tolist() == rows[2:].tolist()
    with pytest.raises(DeadlineError):
        partition.lease("train", 1, deadline=0.05)
    soon(lambda: partition.unit_stats()[0].rows == 2)


def test_what_a_consumer_may_be_reading_stays_until_it_is_done(partition: Partition) -> None:
    rows = partition.put({"reward": np.array([1.0, 2.0])})
    held = partition.lease("judge", 1)
    with pytest.raises(RunError, match="the disk is full"):
        partition.put({"score": np.array([0.5, -0.5])}, rows=rows)
    assert partition.lost(wait=30) == [int(rows[0]) // 2]
    assert partition.get(held).dense("reward").tolist() == [1, 2]
    partition.release(held)
    with pytest.raises(DeadlineError):
        partition.lease("judge", 1, deadline=0.05)
    soon(lambda: partition.unit_stats()[0].rows == 0)


def test_rows_that_were_given_out_before_it_was_known_are_lost(services: Services, partition: Partition) -> None:
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(services.plane().partition("phase").lease, "judge", 1, deadline=0.5)
        with pytest.raises(RunError, match="the disk is full"):
            partition.put({"reward": np.array([1.0, -1.0])})
        try:
            held = waiting.result(30)
        except DeadlineError:
            return
    with pytest.raises(LostRowsError, match="has not all of the rows"):
        partition.get(held)
    partition.release(held)
    soon(lambda: partition.stats().rows == 0)
