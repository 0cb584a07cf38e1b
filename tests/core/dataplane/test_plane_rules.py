"""One small example for each rule that the state machine proves at length: see ``test_plane_machine.py``."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from headrace.contract import Array
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec, Share
from headrace.errors import DeadlineError, LostRowsError, RunError
from support.plane_world import World

SIZE = 2
COLUMNS = {name: ColumnSchema("float32") for name in ("answer", "reward", "pixels")}
READS: dict[str, tuple[str, ...]] = {"score": ("answer",), "train": ("answer", "reward"), "look": ("pixels",)}
AT_ONCE = 1e-6
SILENCE = 7
"""Seconds after which a unit that is gone is missed."""


@pytest.fixture
def partition(world: World) -> Partition:
    world.unit()
    world.unit()
    return world.plane().create(PartitionSpec("phase", COLUMNS, READS, SIZE))


def ones(rows: int, *names: str) -> dict[str, Array]:
    return {name: np.ones(rows, np.float32) for name in names}


def put(partition: Partition, groups: int, *names: str, version: int = 0) -> Array:
    rows: Array = partition.put(ones(groups * SIZE, *names), version=version)
    return rows


def is_offered(partition: Partition, consumer: str) -> bool:
    try:
        partition.release(partition.lease(consumer, 1, deadline=AT_ONCE))
    except DeadlineError:
        return False
    return True


def test_AFL_1_RLX_4_a_row_is_given_when_all_its_columns_are_there_and_waits_for_no_other(partition: Partition) -> None:
    rows = put(partition, 1, "answer")
    assert [is_offered(partition, consumer) for consumer in READS] == [True, False, False], "no pixels are waited for"
    partition.put(ones(1, "reward"), rows=rows[:1])
    assert not is_offered(partition, "train"), "a group of which one row is whole is not given in part"
    partition.put(ones(1, "reward"), rows=rows[1:])
    held = partition.lease("train", 1)
    assert sorted(partition.get(held).columns) == ["answer", "reward"]


def test_AFL_2_RLX_5_each_row_is_given_once_to_each_task_and_all_are_in_the_end(world: World) -> None:
    world.unit()
    put(world.plane().create(PartitionSpec("phase", COLUMNS, READS, SIZE)), 12, "answer", "reward")
    peers = [world.plane().partition("phase") for _ in range(3)]
    for task in ("score", "train"):
        given = []
        for peer in itertools.islice(itertools.cycle(peers), 6):
            held = peer.lease(task, 2)
            given += held.rows.tolist()
            peer.acknowledge(held)
        assert len(given) == len(set(given)) == 12 * SIZE
        with pytest.raises(DeadlineError):
            peers[0].lease(task, 1, deadline=AT_ONCE)


def test_AFL_5_what_one_task_does_leaves_what_another_sees_as_it_was(partition: Partition) -> None:
    rows = put(partition, 4, "answer", "reward")
    partition.acknowledge(partition.lease("score", 2))
    partition.release(partition.lease("score", 1))
    kept = partition.lease("score", 1)
    assert partition.stats().ready["train"] == 4
    assert partition.lease("train", 4).rows.tolist() == rows.tolist()
    partition.acknowledge(kept)


@pytest.mark.parametrize("asked", [1, 3, 5])
def test_AFL_6_groups_are_given_whole(partition: Partition, asked: int) -> None:
    put(partition, 5, "answer")
    rows = partition.lease("score", asked).rows
    assert len(rows) == asked * SIZE
    assert (rows.reshape(-1, SIZE) // SIZE == rows[::SIZE, None] // SIZE).all()


def test_RLX_1_no_row_older_than_the_consumer_allows_is_given_and_the_oldest_come_first(partition: Partition) -> None:
    by_version = {version: put(partition, 1, "answer", version=version).tolist() for version in (3, 1, 2)}
    assert partition.lease("score", 2, min_version=2).rows.tolist() == by_version[2] + by_version[3]
    with pytest.raises(DeadlineError):
        partition.lease("score", 1, min_version=2, deadline=AT_ONCE)
    assert partition.lease("score", 1).rows.tolist() == by_version[1]


def test_RLX_6_every_process_of_a_rank_gets_the_same_rows_whichever_asks_first(partition: Partition) -> None:
    put(partition, 8, "answer")
    for batch, order in enumerate([(0, 1, 0, 1), (1, 1, 0, 0)]):
        given = [(rank, partition.lease("score", 4, share=Share(batch, rank, 2)).rows.tolist()) for rank in order]
        assert len({tuple(rows) for _, rows in given}) == 2
        assert all(rows == other for rank, rows in given for whose, other in given if whose == rank)


def test_DORA_2_what_was_put_is_acknowledged_here_dropped_or_lost(world: World, partition: Partition) -> None:
    groups = {int(row) // SIZE for _ in range(8) for row in put(partition, 1, "answer", "reward", "pixels")}
    done = []
    for consumer in READS:
        held = partition.lease(consumer, 2)
        partition.acknowledge(held)
        done.append({row // SIZE for row in held.rows.tolist()})
    assert done[0] == done[1] == done[2]
    dropped = min(groups - done[0])
    partition.drop([dropped])
    world.lose("unit-2")
    world.wait(7.0)
    lost = set(partition.lost())
    here = {row // SIZE for row in partition.lease("look", 8, at_least=1).rows.tolist()}
    assert lost
    assert done[0] | {dropped} | lost | here == groups
    assert len(done[0]) + 1 + len(lost) + len(here) == len(groups)


def test_rows_that_were_lost_on_lease_are_acknowledged_by_nobody_and_the_rest_of_the_lease_is_given_again(
    world: World,
) -> None:
    _, other = world.unit(), world.unit()
    partition = world.plane().create(PartitionSpec("phase", COLUMNS, READS, SIZE))
    put(partition, 1, "answer"), put(partition, 1, "answer")
    held = partition.lease("score", 2)
    batch = partition.get(held)
    world.lose(other)
    world.wait(SILENCE)
    (lost,) = partition.lost()
    for late in (partition.extend, partition.acknowledge):
        with pytest.raises(LostRowsError, match=rf"held groups \[{lost}\] when a storage unit lost them") as told:
            late(held)
    assert "made anew" in told.value.fix
    again = partition.lease("score", 2, at_least=1)
    assert again.rows.tolist() == [row for row in batch.rows.tolist() if row // SIZE != lost], "and it is ready again"
    partition.acknowledge(again)
    with pytest.raises(RunError, match="is not held"):
        partition.acknowledge(held)


def test_what_lies_beside_lost_values_can_be_read_until_its_reader_has_said_a_word(world: World) -> None:
    _, other = world.unit(), world.unit()
    partition = world.plane().create(PartitionSpec("phase", COLUMNS, {"look": ("pixels",)}))
    rows = partition.put(ones(1, "pixels"))
    partition.put(ones(1, "reward"), rows=rows)
    held = partition.lease("look", 1)
    world.lose(other)
    world.wait(SILENCE)
    assert partition.lost() == rows.tolist()
    assert partition.get(held).dense("pixels").tolist() == [1]
    with pytest.raises(LostRowsError, match="made anew"):
        partition.acknowledge(held)
    with pytest.raises(LostRowsError, match="has not all of the rows"):
        partition.get(held)
    assert partition.stats().leases == 0
