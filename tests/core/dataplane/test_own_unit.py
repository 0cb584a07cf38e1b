"""A ledger that is a storage unit too: one word to put, one to have rows with their values."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Batch
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.dataplane.unit import stored_names
from headrace.errors import ContractError, DeadlineError, LostRowsError
from headrace_storage.memory import MemoryStorage
from support.data_plane import Services, soon

SPEC = PartitionSpec(
    "phase", {"reward": ColumnSchema("float32"), "extra": ColumnSchema("int64")}, {"train": ("reward", "extra")}
)
(REWARD,) = stored_names("phase", ("reward",))
VALUES = {"reward": np.arange(3, dtype=np.float32), "extra": np.arange(3, dtype=np.int64)}


class Watched(MemoryStorage):
    """Counts reads, and refuses a reward of 13."""

    def __init__(self) -> None:
        super().__init__(None)
        self.reads = 0

    def put(self, batch: Batch) -> int:
        if REWARD in batch.columns and (batch.dense(REWARD) == 13).any():
            raise OSError("no")
        return super().put(batch)

    def get(self, rows: object, columns: object) -> Batch:
        self.reads += 1
        return super().get(rows, columns)  # type: ignore[arg-type]  # as they came


@pytest.fixture
def storage() -> Watched:
    return Watched()


@pytest.fixture
def home(tmp_path: Path, storage: Watched) -> Iterator[Services]:
    tmp_path.chmod(0o700)
    running = Services(tmp_path, own=storage, capacity=120)
    yield running
    running.close()


@pytest.fixture
def partition(home: Services) -> Partition:
    return home.plane().create(SPEC)


def test_rows_come_with_their_values_and_nothing_is_read_twice(partition: Partition, storage: Watched) -> None:
    rows = partition.put(VALUES)
    held, batch = partition.take("train", 3)
    assert batch.rows.tolist() == held.rows.tolist() == rows.tolist()
    assert batch.dense("reward").tolist() == [0, 1, 2]
    assert storage.reads == 1
    partition.acknowledge(held)
    soon(lambda: partition.unit_stats()[0].rows == 0)


def test_only_the_columns_that_are_asked_for_come(partition: Partition) -> None:
    partition.put(VALUES)
    _, batch = partition.take("train", 1, columns=["extra"])
    assert list(batch.columns) == ["extra"]
    with pytest.raises(ContractError, match="asks for"):
        partition.take("train", 1, columns=["nothing"])
    assert len(partition.lease("train", 2).rows) == 2, "a refused call takes nothing"


def test_a_consumer_that_waits_is_given_the_values_by_the_write_that_completes_them(
    home: Services, partition: Partition
) -> None:
    ready = threading.Event()

    def wait() -> list[float]:
        mine = home.plane().partition("phase")
        ready.set()
        values: list[float] = mine.take("train", 3)[1].dense("reward").tolist()
        return values

    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(wait)
        assert ready.wait(30)
        rows = partition.put({"reward": VALUES["reward"]})
        partition.put({"extra": VALUES["extra"]}, rows=rows)
        assert waiting.result(30) == [0, 1, 2]


def test_what_is_elsewhere_is_fetched_from_there(home: Services, partition: Partition) -> None:
    home.unit()
    spread = home.plane().partition("phase")
    for _ in range(2):
        spread.put({name: values[:1] for name, values in VALUES.items()})
    _, batch = spread.take("train", 2)
    assert batch.dense("reward").tolist() == [0, 0]
    assert [stats.rows for stats in spread.unit_stats()] == [1, 1]


def test_a_full_unit_lets_new_rows_wait_until_others_leave(home: Services, partition: Partition) -> None:
    for _ in range(3):
        partition.put(VALUES)  # 36 bytes each
    with pytest.raises(DeadlineError):
        home.plane().partition("phase").put(VALUES, deadline=0.05)
    with ThreadPoolExecutor() as pool:
        blocked = pool.submit(lambda: home.plane().partition("phase").put(VALUES))
        held, _ = partition.take("train", 3)
        partition.acknowledge(held)
        assert len(blocked.result(30)) == 3


def test_rows_that_the_storage_would_not_keep_are_given_to_nobody(partition: Partition) -> None:
    with pytest.raises(Exception, match="no"):
        partition.put({name: values + 13 for name, values in VALUES.items()})
    with pytest.raises((DeadlineError, LostRowsError)):
        partition.take("train", 1, deadline=0.05)
