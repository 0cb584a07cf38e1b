"""Several ledgers behind one client; ``test_plane_machine.py`` compares them with a model too."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec
from headrace.dataplane.messages import Noted, Put, Share
from headrace.dataplane.serve import serve_ledger
from headrace.dataplane.sharded import ShardedPartition
from headrace.dataplane.shards import fair_shares, oldest_shares, shards_of
from headrace.errors import ContractError, DeadlineError, LostRowsError, RunError
from headrace_storage.memory import MemoryStorage
from support.data_plane import Services, soon
from support.plane_world import LEDGER, BlockingClient, World

AT_ONCE = 1e-6
SILENCE = 7
"""Seconds after which a unit that is gone is missed."""
SPEC = PartitionSpec("phase", {"tokens": ColumnSchema("int32", ragged=True)}, {"train": ("tokens",)}, 2, "tokens")


def put(partition: Partition, lengths: list[int], version: int = 0) -> list[int]:
    """A group of two rows for each length."""
    tokens = [np.arange(length, dtype=np.int32) for length in lengths for _ in range(2)]
    return partition.put({"tokens": Ragged.from_arrays(tokens)}, version=version)[::2].tolist()


def owners(rows: Any) -> list[int]:
    return shards_of(np.array(rows) // 2, 2).tolist()


@pytest.fixture
def world() -> Iterator[World]:
    running = World(shards=2)
    running.unit()
    running.unit()
    yield running
    running.close()


@pytest.fixture
def partition(world: World) -> Partition:
    return world.plane().create(SPEC)


# ---------------------------------------------------------------- shares


@given(there=st.lists(st.integers(0, 20), min_size=1, max_size=5), wanted=st.integers(0, 60), first=st.integers(0, 4))
def test_shares_are_as_even_as_what_is_there_allows(there: list[int], wanted: int, first: int) -> None:
    shares = fair_shares(there, wanted, first=first % len(there))
    assert sum(shares) == min(wanted, sum(there))
    assert all(share <= count for share, count in zip(shares, there, strict=True))
    not_all = [share for share, count in zip(shares, there, strict=True) if share < count]
    assert not not_all or max(shares) - min(not_all) <= 1


@given(
    ready=st.lists(st.dictionaries(st.integers(0, 4), st.integers(1, 9)), min_size=1, max_size=4),
    wanted=st.integers(0, 40),
)
def test_the_oldest_of_all_shards_come_first(ready: list[dict[int, int]], wanted: int) -> None:
    there = sorted(version for shard in ready for version, count in shard.items() for _ in range(count))
    left = [sorted(version for version, count in shard.items() for _ in range(count)) for shard in ready]
    taken = [left[shard].pop(0) for shard, count in oldest_shares(ready, wanted, first=0) for _ in range(count)]
    assert taken == there[:wanted]


# ---------------------------------------------------------------- one client


def test_new_groups_go_to_shards_in_turn_and_a_lease_has_of_all(partition: Partition) -> None:
    rows = [row for _ in range(8) for row in put(partition, [3])]
    assert owners(rows) == [0, 0, 1, 1] * 2, "each unit gives them in turn"
    held, batch = partition.take("train", 8)
    assert sorted(held.rows[::2].tolist()) == sorted(rows)
    assert held.groups == 8
    assert batch.rows.tolist() == held.rows.tolist()
    partition.acknowledge(held)
    assert partition.stats().rows == 0


def test_the_oldest_version_of_all_shards_is_leased_first(partition: Partition) -> None:
    rows = {version: put(partition, [3], version) for version in (5, 2, 1, 4, 3, 0)}
    assert len(set(owners([row for made in rows.values() for row in made]))) == 2
    given = [partition.lease("train", 2).rows[::2].tolist() for _ in range(3)]
    assert [sorted(pair) for pair in given] == [sorted(rows[v] + rows[v + 1]) for v in (0, 2, 4)]


def test_a_budget_is_one_for_all_shards(partition: Partition) -> None:
    rows = [put(partition, [3], version)[0] for version in range(4)]
    assert partition.lease("train", 4, at_least=1, token_budget=18).rows[::2].tolist() == rows[:3]
    held = partition.lease("train", 4, at_least=1, token_budget=1)
    assert held.rows[::2].tolist() == rows[3:], "the first may be over it"


def test_a_group_that_passes_the_budget_is_not_counted_as_tried(partition: Partition) -> None:
    small, _, large = put(partition, [1], 0), put(partition, [1], 9), put(partition, [9], 1)
    assert owners(small + large) == [0, 1]
    assert partition.lease("train", 2, at_least=1, token_budget=10).rows[::2].tolist() == small
    held = partition.lease("train", 1)
    assert (held.rows[::2].tolist(), held.attempts.tolist()) == (large, [1, 1])


def test_a_consumer_that_works_by_row_is_given_rows_of_all_shards(world: World) -> None:
    spec = PartitionSpec("phase", SPEC.columns, {"score": ("tokens",)}, 2, "tokens", by_row=("score",))
    partition = world.plane().create(spec)
    rows = [row for _ in range(4) for row in put(partition, [3])]
    held = partition.lease("score", 5, deadline=AT_ONCE)
    assert (held.groups, len(held)) == (5, 5)
    assert set(owners(held.rows)) == {0, 1}
    partition.release(held)
    held = partition.lease("score", 8, at_least=1, token_budget=10)
    assert (held.groups, held.tokens.sum()) == (3, 9), "a budget is of rows too, and one for all shards"
    partition.release(held)
    rest = partition.lease("score", 9, at_least=8, deadline=AT_ONCE)
    assert sorted(rest.rows.tolist()) == sorted(rows + [row + 1 for row in rows])
    partition.acknowledge(rest)
    assert partition.stats().rows == 0


@pytest.mark.parametrize("shard", [0, 1])
def test_a_word_that_one_shard_did_not_answer_is_taken_once_by_each(
    world: World, partition: Partition, shard: int
) -> None:
    """It is said to all again: the others answer as before, and new groups stay whose they were."""
    methods = world._services[world.ledgers[shard]]
    note, said = methods["note"], []

    def swallowed(notes: Any) -> Any:
        said.append(notes)
        answer = note.call(notes)
        return answer if len(said) > 1 else world.clock.create_future()

    methods["note"] = replace(note, call=swallowed)
    tokens = {"tokens": Ragged.from_arrays([np.arange(3, dtype=np.int32)] * 2)}
    unit = world.client("unit-2")
    # The first is told at once, the others together when it is answered.
    flights = [unit.submit("put", Put("phase", None, tokens, 0), reply=Noted, deadline=999.0) for _ in range(5)]
    world.wait(200.0)
    made = sorted(flight.result().first for flight in flights)
    assert len(set(made)) == 5
    assert set(owners(made)) == {0, 1}
    assert partition.stats().rows == 10
    held, batch = partition.take("train", 9, at_least=5, deadline=AT_ONCE)
    assert sorted(held.rows[::2].tolist()) == made
    assert len(batch) == 10


def test_a_partition_that_is_made_anew_is_so_at_all_shards(world: World, partition: Partition) -> None:
    """Also where one shard has made more of them than another."""
    first = put(partition, [3])
    world.outcome(world.say(world.ledgers[1], "create", PartitionSpec("other", SPEC.columns, SPEC.consumers)))
    plane = world.plane()
    plane.remove("phase")
    floats = PartitionSpec("phase", {"x": ColumnSchema("float32")}, {"train": ("x",)}, 2)
    again = plane.create(floats)
    made = [again.put({"x": np.full(2, n, np.float32)})[0] for n in range(4)]
    assert set(owners(made)) == {0, 1}
    assert not set(made) & set(first)
    _, batch = again.take("train", 4)
    assert sorted(batch.dense("x").tolist()) == [0, 0, 1, 1, 2, 2, 3, 3]


def test_whoever_waits_is_woken_by_whichever_shard_and_leaves_nothing_behind(
    world: World, partition: Partition
) -> None:
    with pytest.raises(DeadlineError):
        partition.lease("train", 1, deadline=0.5)
    world.settle()
    assert partition.stats().waiting == {"train": 0}
    unit = world.client("unit-2")
    tokens = Ragged.from_arrays([np.arange(3, dtype=np.int32)] * 2)
    shards = []
    for _ in range(4):
        began = world.clock.now
        new = Put("phase", None, {"tokens": tokens}, 0)
        world.clock.call_later(0.5, lambda new=new: unit.submit("put", new, reply=Noted, deadline=9.0))
        held = partition.lease("train", 1, deadline=5.0)
        assert 0.5 <= world.clock.now - began < 0.8
        shards += owners(held.rows[:1])
    assert shards == [0, 1, 0, 1]
    assert partition.stats().waiting == {"train": 0}


def test_those_who_find_too_little_give_it_back(world: World, partition: Partition, monkeypatch: Any) -> None:
    """Another is faster between the look and the taking."""
    rows = [row for _ in range(4) for row in put(partition, [3])]
    other = world.plane().partition("phase")
    look, taken = ShardedPartition._look, []

    def slow(self: Any, *args: Any) -> Any:
        ready = look(self, *args)
        if self is partition and not taken:
            taken.append(other.lease("train", 2))
        return ready

    monkeypatch.setattr(ShardedPartition, "_look", slow)
    with pytest.raises(DeadlineError):
        partition.lease("train", 4, at_least=3, deadline=1.0)
    other.acknowledge(taken[0])
    held = partition.lease("train", 4, at_least=2)
    assert sorted([*held.rows[::2].tolist(), *taken[0].rows[::2].tolist()]) == sorted(rows)
    assert partition.stats().leases == len(held.parts)


def test_a_lease_that_ended_at_one_shard_is_acknowledged_at_none(world: World, partition: Partition) -> None:
    for _ in range(4):
        put(partition, [3])
    held = partition.lease("train", 4)
    first, second = held.parts
    partition.release(second)
    with pytest.raises(RunError, match="is not held"):
        partition.acknowledge(held)
    assert partition.stats().rows == 8
    partition.acknowledge(first)


def test_a_lease_of_which_rows_were_lost_is_acknowledged_at_no_shard_and_given_back_at_all(
    world: World, partition: Partition
) -> None:
    rows = [put(partition, [3])[0] for _ in range(4)]
    held = partition.lease("train", 4)
    world.lose("unit-2")
    world.wait(SILENCE)
    lost = partition.lost()
    assert len(held.parts) == 2
    assert lost
    with pytest.raises(LostRowsError, match="when a storage unit lost them"):
        partition.acknowledge(held)
    assert partition.stats().leases == 0
    again = partition.lease("train", 4, at_least=1)
    assert sorted(again.rows[::2].tolist()) == sorted(row for row in rows if row // 2 not in lost)


def test_columns_of_rows_of_several_shards_are_put_at_once(world: World) -> None:
    columns = {**SPEC.columns, "reward": ColumnSchema("float32")}
    spec = PartitionSpec("phase", columns, {"train": ("tokens", "reward")}, 2, "tokens")
    partition = world.plane().create(spec)
    rows = np.array([row + member for _ in range(4) for row in put(partition, [3]) for member in (0, 1)])
    order = np.random.default_rng(0).permutation(len(rows))
    noted = partition.try_put({"reward": rows[order].astype(np.float32) % 251}, rows=rows[order])
    assert noted.refused is None
    held, batch = partition.take("train", 4)
    assert batch.dense("reward").tolist() == (held.rows.astype(np.float32) % 251).tolist()
    again = partition.try_put({"reward": np.zeros(8, np.float32)}, rows=rows)
    assert again.refused is not None
    assert again.refused.tolist() == [1] * 8


def test_all_shards_miss_a_unit_that_is_lost(world: World, partition: Partition) -> None:
    rows = [row for _ in range(8) for row in put(partition, [3])]
    (gone,) = [storage for address, storage in world.storages.items() if address == "unit-3"]
    lost = sorted(row // 2 for row in rows if has_row(gone, row))
    world.lose("unit-3")
    world.wait(7)
    assert set(owners([group * 2 for group in lost])) == {0, 1}
    assert sorted(world.plane().partition("phase").lost(wait=1.0)) == lost


def has_row(storage: Any, row: int) -> bool:
    try:
        storage.get([row], ["phase/tokens"])
    except KeyError:
        return False
    return True


def test_news_of_lost_rows_come_from_whichever_shard(world: World, partition: Partition) -> None:
    rows = put(partition, [3])
    (address,) = [address for address, storage in world.storages.items() if has_row(storage, rows[0])]
    world.lose(address)
    assert partition.lost(wait=100.0) == [rows[0] // 2]


# ---------------------------------------------------------------- mistakes


def test_ledgers_in_another_order_or_number_are_refused(world: World, partition: Partition) -> None:
    for ledgers in ([f"{LEDGER}-1", LEDGER], [LEDGER], [f"{LEDGER}-1"]):
        plane = DataPlane(ledgers, connect=lambda address: BlockingClient(world, address))  # type: ignore[arg-type, return-value]
        with pytest.raises(ContractError, match=r"was named as shard 0 of [12]") as refused:
            plane.partition("phase")
        assert refused.value.fix == "name all ledgers of the data plane, in their order"


def test_a_lease_that_means_nothing_is_refused_though_nothing_is_ready(partition: Partition) -> None:
    wrong: list[dict[str, Any]] = [{"at_least": 3}, {"at_least": 0}, {"token_budget": -1}, {"seconds": 0.0}]
    for how in wrong:
        with pytest.raises(ContractError, match="a lease"):
            partition.lease("train", 2, **how)
    with pytest.raises(ContractError, match="no consumer 'nobody'"):
        partition.lease("nobody", 1)
    with pytest.raises(DeadlineError, match=r"no 7 groups of partition 'phase' for train within 0\.5 s"):
        partition.lease("train", 9, at_least=7, deadline=0.5)


def test_ranks_share_batches_of_one_ledger_only(partition: Partition) -> None:
    with pytest.raises(ContractError, match="ranks cannot share batches"):
        partition.lease("train", 2, share=Share(0, 0, 2))
    with pytest.raises(ContractError, match="ranks cannot share batches"):
        partition.first_batch("train")


def test_an_order_of_ones_own_is_one_of_one_ledger(partition: Partition) -> None:
    put(partition, [1, 2])
    with pytest.raises(ContractError, match="order of its own in a data plane with several ledgers"):
        partition.lease("train", 1, order=lambda ready: np.argsort(-ready.tokens), deadline=AT_ONCE)


async def test_a_shard_is_no_storage_unit() -> None:
    with pytest.raises(ContractError, match="is no storage unit"):
        await serve_ledger("ipc:///nowhere", MemoryStorage(None), shards=2)


def test_a_snapshot_of_two_ledgers_is_restored_into_two(world: World, partition: Partition, tmp_path: Path) -> None:
    rows = [row for _ in range(4) for row in put(partition, [3])]
    world.plane().snapshot(tmp_path / "file")
    for shards in (1, 2):
        again = World(shards=shards)
        try:
            again.unit()
            if shards == 1:
                with pytest.raises(RunError, match="is a snapshot of 2 ledgers, there are 1"):
                    again.plane().restore(tmp_path / "file")
                continue
            again.plane().restore(tmp_path / "file")
            held = again.plane().partition("phase").lease("train", 9, at_least=1)
            assert sorted(held.rows[::2].tolist()) == sorted(rows)
        finally:
            again.close()


# ---------------------------------------------------------------- over sockets


def test_many_who_wait_at_two_ledgers_get_each_group_once(tmp_path: Path) -> None:
    """Consumers that want several at once are in each other's way, and all get on."""
    tmp_path.chmod(0o700)
    services = Services(tmp_path, shards=2)
    try:
        services.unit()
        services.unit()
        partition = services.plane().create(SPEC)
        planes = [services.plane() for _ in range(4)]
        seen: list[list[int]] = [[] for _ in planes]

        def consume(place: int) -> None:
            mine = planes[place].partition("phase")
            for _ in range(10):
                held, batch = mine.take("train", 3, deadline=30.0)
                seen[place] += batch.rows.tolist()
                mine.acknowledge(held)

        threads = [threading.Thread(target=consume, args=(place,)) for place in range(4)]
        for thread in threads:
            thread.start()
        soon(lambda: partition.stats().waiting["train"] == 4)
        rows = [row + member for _ in range(60) for row in put(partition, [2, 3]) for member in (0, 1)]
        for thread in threads:
            thread.join(60)
        assert Counter(row for part in seen for row in part) == Counter(rows)
        assert partition.stats().rows == 0
    finally:
        services.close()
