"""Cases of group J, and I03, as far as the data plane has a part in them.

J01 and J07 for a run's flow are in ``test_cases_flow.py``, J02 for its storage in ``test_cases_load.py``, I03 for its
scoring in ``test_cases_environments.py``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random

import numpy as np
import pytest

from headrace.contract import Array, Column, Ragged
from headrace.dataplane import Candidates, ColumnSchema, DataPlane, Partition, PartitionSpec, Stream
from headrace.dataplane.messages import Noted, Put, UnitFigures
from headrace.errors import ContractError, DeadlineError
from headrace_storage.shared_memory import SharedMemoryStorage
from support.data_plane import Services, soon
from support.plane_consumers import consume_all, processes
from support.plane_world import World
from support.served import a_ledger

AT_ONCE = 1e-6
COLUMNS = {
    "tokens": ColumnSchema("int32", ragged=True),
    "reward": ColumnSchema("float32"),
    "pixels": ColumnSchema("uint8", (64, 64, 3)),
}
READS: dict[str, tuple[str, ...]] = {"score": ("tokens",), "train": ("tokens", "reward")}


def spec(group_size: int = 1) -> PartitionSpec:
    return PartitionSpec("phase", COLUMNS, READS, group_size, "tokens")


def tokens(lengths: list[int]) -> Ragged:
    return Ragged.from_arrays([np.arange(length, dtype=np.int32) for length in lengths])


def reward(count: int) -> dict[str, Column]:
    return {"reward": np.ones(count, np.float32)}


@pytest.fixture
def world() -> Iterator[World]:
    running = World()
    yield running
    running.close()


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    tmp_path.chmod(0o700)
    running = Services(tmp_path)
    yield running
    running.close()


def test_J01_surplus_stays_and_everything_put_is_accounted_for(world: World) -> None:
    world.unit()
    other = world.unit()
    partition = world.plane().create(spec())
    rows = np.concatenate([partition.put({"tokens": tokens([3]), **reward(1)}) for _ in range(20)])
    batch = partition.lease("train", 8, at_least=4)
    assert len(batch) == 8, "a batch is what was asked for, the surplus stays"
    for consumer in READS:
        held = batch if consumer == "train" else partition.lease(consumer, 8)
        partition.acknowledge(held)
    on_lease = partition.lease("train", 3)
    partition.drop(rows[12:14].tolist())
    world.lose(other)
    world.wait(7)
    lost = set(partition.lost())
    here = partition.stats().rows
    assert 8 + here + 2 + len(lost) == len(rows)
    assert len(lost) == 5, "every other row of those that were here"
    left = set(rows[8:].tolist()) - set(rows[12:14].tolist()) - lost
    partition.release(on_lease)
    assert set(partition.lease("train", 20, at_least=1).rows.tolist()) == left


def test_J02_while_the_trainer_stands_still_the_unit_is_bounded_and_the_producer_waits(world: World) -> None:
    """2000 samples of 100k tokens are on offer."""
    sample, bound = 4 * 100_000, 32 * 4 * 100_000
    unit = world.unit(capacity=bound)
    partition = world.plane().create(spec())
    made = 0
    while made < 2000 and try_to_put(partition, 100_000):
        made += 1
    assert made * sample == world.storages[unit].stats().nbytes == bound
    held = partition.lease("score", 10)
    partition.put(reward(10), rows=held.rows)
    partition.acknowledge(held)
    partition.acknowledge(partition.lease("train", 10))
    world.settle()
    assert world.storages[unit].stats().nbytes == bound - 10 * sample, "what all have seen is gone"
    assert [try_to_put(partition, 100_000) for _ in range(11)] == [True] * 10 + [False]
    assert world.storages[unit].stats().nbytes == bound


def try_to_put(partition: Partition, length: int) -> bool:
    try:
        partition.put({"tokens": tokens([length])}, deadline=AT_ONCE)
    except DeadlineError:
        return False
    return True


def test_J03_pixels_go_to_nobody_who_does_not_ask_for_them(world: World) -> None:
    unit = world.unit()
    partition = world.plane().create(spec())
    pixels = np.zeros((8, 64, 64, 3), np.uint8)
    partition.put({"tokens": tokens([5] * 8), "pixels": pixels, **reward(8)})
    for consumer, reads in READS.items():
        batch = partition.get(partition.lease(consumer, 8))
        assert set(batch.columns) == set(reads)
    assert world.bytes_from[unit, "get"] < pixels.nbytes / 50
    assert world.bytes_to["ledger", "note"] < pixels.nbytes / 50


def test_J03_an_image_of_a_whole_group_is_sent_once_and_kept_once(world: World) -> None:
    unit = world.unit()
    columns = {**COLUMNS, "pixels": ColumnSchema("uint8", (64, 64, 3), by_content=True)}
    partition = world.plane().create(PartitionSpec("phase", columns, {"look": ("pixels",)}, 8))
    pixels = np.zeros((8, 64, 64, 3), np.uint8)
    for _ in range(3):
        partition.put({"pixels": pixels})
    one = pixels[0].nbytes
    assert world.bytes_to[unit, "put"] < 3 * 1.1 * one, "each put sends one"
    assert world.storages[unit].stats().nbytes < 1.1 * one
    _, batch = partition.take("look", 3)
    assert world.bytes_from[unit, "get"] < 1.1 * one
    assert (batch.repeated["pixels"].column() == 0).all()


@pytest.mark.parametrize("way", ["sent", "mapped"])
def test_J03_bytes_are_counted_by_column_and_by_the_way_they_went(services: Services, way: str) -> None:
    """Images go once to whoever reads them, in shared memory not even that."""
    services.unit(storage=SharedMemoryStorage(SharedMemoryStorage.Settings()) if way == "mapped" else None)
    readers = {**READS, "look": ("pixels",)}
    partition = services.plane().create(PartitionSpec("phase", COLUMNS, readers, 1, "tokens"))
    pixels = np.zeros((8, 64, 64, 3), np.uint8)
    partition.put({"tokens": tokens([5] * 8), "pixels": pixels, **reward(8)})
    for consumer in readers:
        partition.get(partition.lease(consumer, 8))
    (unit,) = partition._units.addresses
    figures = services.plane().client(unit).call("figures", reply=UnitFigures, deadline=30)
    assert {(hop, column): nbytes for hop, _, column, nbytes in figures.traffic} == {
        ("put", "tokens"): 160,
        ("put", "pixels"): pixels.nbytes,
        ("put", "reward"): 32,
        ("sent", "tokens"): 2 * 160,
        ("sent", "reward"): 32,
        (way, "pixels"): pixels.nbytes,
    }


def test_J04_each_task_sees_each_sample_once_and_complete_whoever_shares_the_work(
    services: Services, tmp_path: Path
) -> None:
    """4 processes and 1000 samples, written field by field in random order."""
    names = ("number", "first", "second", "third")
    reads: dict[str, tuple[str, ...]] = {"score": ("number", "second"), "train": names}
    services.unit()
    services.unit()
    columns = {name: ColumnSchema("int64") for name in names}
    partition = services.plane().create(PartitionSpec("phase", columns, reads))
    count, chance, end = 1000, Random(0), tmp_path / "end"
    with processes(4) as pool:
        consumers = [*reads, *reads]
        found = [pool.submit(consume_all, services.ledger, consumer, end) for consumer in consumers]
        rows = partition.put({"number": np.arange(count)})
        missing = [(name, row) for name in names[1:] for row in rows.tolist()]
        chance.shuffle(missing)
        for start in range(0, len(missing), 20):
            write(partition, missing[start : start + 20])
        end.touch()
        seen = [(consumer, future.result(60)) for consumer, future in zip(consumers, found, strict=True)]
    for consumer in reads:
        given = [sample for task, samples in seen if task == consumer for sample in samples]
        assert Counter(row for row, _, _ in given) == Counter(rows.tolist())
        assert {came for _, came, _ in given} == {tuple(sorted(reads[consumer]))}
        assert all(row == rows[number] for row, _, number in given)


def write(partition: Partition, cells: list[tuple[str, int]]) -> None:
    for name in {name for name, _ in cells}:
        rows = np.array([row for column, row in cells if column == name])
        partition.put({name: rows * 2}, rows=rows)


def test_J04_an_order_of_ones_own_is_obeyed_and_shared_with_who_takes_the_oldest_first(world: World) -> None:
    world.unit()
    partition = world.plane().create(spec())
    lengths = [5, 40, 1, 30, 20, 10, 2, 3]
    rows = partition.put({"tokens": tokens(lengths), **reward(8)}, version=3).tolist()

    def longest_first(ready: Candidates) -> Array:
        assert set(ready.versions.tolist()) == {3}
        return np.argsort(-ready.tokens)

    first = partition.lease("train", 2, order=longest_first)
    assert first.rows.tolist() == [rows[1], rows[3]]
    assert partition.lease("train", 3).rows.tolist() == [rows[0], rows[2], rows[4]], "the others are as they were"
    partition.release(first)
    rest, batch = partition.take("train", 9, at_least=1, token_budget=75, order=longest_first)
    assert rest.rows.tolist() == [rows[1], rows[3]]
    assert batch.ragged("tokens").lengths.tolist() == [40, 30]
    assert partition.lease("train", 3).rows.tolist() == rows[5:], "what passed its budget keeps its place"
    assert partition.lease("score", 8).rows.tolist() == rows, "another task has an order of its own"


def test_J04_what_an_order_leaves_out_is_waited_past_though_others_take_it(world: World) -> None:
    """Fewer are ready than were when the order looked, and among them is what it wants."""
    world.unit()
    partition, other = world.plane().create(spec()), world.plane().partition("phase")
    partition.put({"tokens": tokens([1, 1, 1]), **reward(3)})
    asked = []

    def only_long(ready: Candidates) -> Array:
        asked.append(len(ready.ids))
        if len(asked) == 1:
            other.lease("train", 3)
            world.clock.call_later(2.0, put_long)
        return np.flatnonzero(ready.tokens > 10)

    def put_long() -> None:
        put = Put("phase", None, {"tokens": tokens([20]), **reward(1)}, 0)
        world.client("unit-1").submit("put", put, reply=Noted, deadline=5.0)

    held = partition.lease("train", 1, order=only_long, deadline=5.0)
    assert held.tokens.tolist() == [20]
    assert asked == [3, 1], "asked again when there was something new"
    partition.put({"tokens": tokens([1]), **reward(1)})
    with pytest.raises(DeadlineError, match="1 groups of partition 'phase' for train that its order wants within 5 s"):
        partition.lease("train", 1, order=only_long, deadline=5.0)


def test_J04_what_others_take_while_an_order_chooses_is_looked_for_again(world: World) -> None:
    world.unit()
    partition, other = world.plane().create(spec()), world.plane().partition("phase")
    rows = partition.put({"tokens": tokens([1, 1, 1]), **reward(3)}).tolist()
    taken: list[int] = []

    def any_while_another_takes_one(ready: Candidates) -> Array:
        taken.extend(other.lease("train", 1).rows.tolist() if not taken else [])
        return np.arange(len(ready.ids))

    held = partition.lease("train", 3, at_least=2, order=any_while_another_takes_one, deadline=5.0)
    assert taken == rows[:1]
    assert held.rows.tolist() == rows[1:]


@pytest.mark.parametrize("places", [[0, 0], [2], [-1], [0.5], [[0]], [True, False]])
def test_J04_an_order_that_gives_no_places_is_refused(world: World, places: list[object]) -> None:
    world.unit()
    partition = world.plane().create(spec())
    partition.put({"tokens": tokens([1, 2]), **reward(2)})
    with pytest.raises(ContractError, match="an order of 2 candidates gave"):
        partition.lease("train", 1, order=lambda ready: np.array(places), deadline=5.0)
    assert partition.stats().ready["train"] == 2


def test_J05_a_column_that_is_put_later_leaves_the_others_as_they_are(world: World) -> None:
    world.unit()
    partition = world.plane().create(spec())
    rows = partition.put({"tokens": tokens([4])})
    partition.put(reward(1), rows=rows)
    refused = partition.try_put({"tokens": tokens([9])}, rows=rows).refused
    assert refused.tolist() == [1], "nothing is replaced"
    batch = partition.get(partition.lease("train", 1))
    assert batch.ragged("tokens")[0].tolist() == [0, 1, 2, 3]
    assert batch.dense("reward").tolist() == [1.0]


def test_J05_what_was_put_in_two_parts_is_whole_after_a_restart(tmp_path: Path) -> None:
    with closing(World()) as world:
        world.unit()
        partition = world.plane().create(spec())
        rows = partition.put({"tokens": tokens([4, 2])})
        partition.put(reward(1), rows=rows[:1])
        world.plane().snapshot(tmp_path / "snapshot")
    with closing(World()) as world:
        world.unit()
        world.plane().restore(tmp_path / "snapshot")
        partition = world.plane().partition("phase")
        held, batch = partition.take("train", 2, at_least=1)
        assert held.rows.tolist() == rows[:1].tolist(), "what was half there is half there"
        assert batch.ragged("tokens")[0].tolist() == [0, 1, 2, 3]
        assert batch.dense("reward").tolist() == [1.0]
        partition.put(reward(1), rows=rows[1:])
        _, batch = partition.take("train", 2, at_least=1)
        assert batch.ragged("tokens")[0].tolist() == [0, 1]


def test_J08_after_kill_9_all_groups_of_the_last_snapshot_are_back_and_none_twice(tmp_path: Path) -> None:
    """The window of loss is what came after the snapshot; what was acknowledged after it is given again."""
    tmp_path.chmod(0o700)
    file = tmp_path / "snapshot"
    with a_ledger(tmp_path, "before") as (process, ledger):
        plane = DataPlane(ledger)
        partition = plane.create(spec(group_size=2))
        rows = partition.put({"tokens": tokens([3] * 110), **reward(110)}).tolist()
        partition.acknowledge(partition.lease("train", 5))
        on_lease = partition.lease("train", 3)
        plane.snapshot(file)
        partition.put({"tokens": tokens([3] * 2), **reward(2)})
        partition.acknowledge(on_lease)
        process.kill()
        process.join()
        plane.close()
    with a_ledger(tmp_path, "after") as (process, ledger):
        plane = DataPlane(ledger)
        plane.restore(file)
        partition = plane.partition("phase")
        held, batch = partition.take("train", 200, at_least=1)
        assert held.rows.tolist() == rows[10:], "50 groups, and each once"
        assert [values.tolist() for values in batch.ragged("tokens")] == [[0, 1, 2]] * 100
        assert partition.stats().ready == {"score": 55, "train": 0}
        plane.close()


def test_J06_what_a_stream_holds_back_is_not_lost_at_a_checkpoint(services: Services) -> None:
    """A budget of 10, samples of 6, 6, 6: the first micro-batch is acknowledged, the two that were fetched are not."""
    services.unit()
    partition = services.plane().create(spec())
    rows = partition.put({"tokens": tokens([6, 6, 6]), **reward(3)}).tolist()
    with stream(services) as before:
        assert next(before.step()).rows.tolist() == rows[:1]
        before.acknowledge()
        soon(lambda: partition.stats().ready["train"] == 0)
    with stream(services) as after:
        given = [batch.rows.tolist() for _ in range(2) for batch in after.step()]
        after.acknowledge()
    assert sorted(given) == [[rows[1]], [rows[2]]]


def stream(services: Services) -> Stream:
    return Stream(lambda: services.plane().partition("phase"), "train", step_groups=1, token_budget=10)


def test_J07_a_group_is_offered_when_all_siblings_are_there_and_never_after_it_was_given_up(world: World) -> None:
    unit = world.unit()
    partition = world.plane().create(spec(group_size=2))
    rows = partition.put({"tokens": tokens([3, 3])})
    partition.put(reward(1), rows=rows[:1])
    with pytest.raises(DeadlineError):
        partition.lease("train", 1, deadline=AT_ONCE)
    partition.drop([int(rows[0]) // 2])
    late = partition.try_put(reward(1), rows=rows[1:])
    assert late.refused.tolist() == [2], "told to whoever is late, who counts it"
    world.settle()
    assert world.storages[unit].stats().nbytes == 0
    assert partition.stats().rows == 0


def test_I03_a_slow_scorer_holds_neither_producers_nor_other_consumers(world: World) -> None:
    """Rows are there for everybody else as soon as their tokens are done."""
    world.unit()
    plane = world.plane()
    partition = plane.create(spec())
    first = partition.put({"tokens": tokens([3] * 4)})
    judged = partition.lease("score", 4, seconds=1000.0)
    second = partition.put({"tokens": tokens([3] * 4), **reward(4)})
    assert plane.partition("phase").lease("train", 4).rows.tolist() == second.tolist()
    partition.put(reward(4), rows=first)
    assert partition.lease("train", 4).rows.tolist() == judged.rows.tolist() == first.tolist()
