"""Data-parallel ranks that share a consumer's batches."""

from __future__ import annotations

import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from random import Random

import numpy as np
import pytest

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec, Rows, Share, Stream
from headrace.dataplane.messages import Granted, LeaseCall
from headrace.dataplane.partition import PartitionLedger
from headrace.errors import ContractError, DeadlineError, RunError
from support.data_plane import Services
from support.plane_world import World

SIZE = 2
SPEC = PartitionSpec("phase", {"tokens": ColumnSchema("int32", ragged=True)}, {"train": ("tokens",)}, SIZE, "tokens")
SHORT = 1e-6


def put(partition: Partition, lengths: list[int]) -> list[int]:
    """A group for each, whose rows are so long; returns the rows."""
    tokens = Ragged.from_arrays([np.zeros(length, np.int32) for length in lengths for _ in range(SIZE)])
    rows: list[int] = partition.put({"tokens": tokens}).tolist()
    return rows


@pytest.fixture
def partition(world: World) -> Partition:
    world.unit()
    return world.plane().create(SPEC)


def share(partition: Partition, batch: int, rank: int, ranks: int = 2, groups: int = 4, **how: float) -> Rows:
    deadline = how.pop("deadline", SHORT)
    return partition.lease("train", groups, share=Share(batch, rank, ranks), deadline=deadline, **how)  # type: ignore[arg-type]


def test_whoever_asks_in_whatever_order_and_however_often_gets_the_same(partition: Partition) -> None:
    chance = Random(3)
    ranks, batches, asked = 3, 5, 4
    rows = put(partition, [chance.randrange(1, 50) for _ in range(batches * 6)])
    seen: dict[tuple[int, int], set[tuple[int, ...]]] = {}
    for batch in range(batches):
        calls = [(number, rank) for number in range(batch + 1) for rank in range(ranks) for _ in range(asked)]
        chance.shuffle(calls)
        share(partition, batch, chance.randrange(ranks), ranks, 6)
        for number, rank in calls:
            held = share(partition, number, rank, ranks, 6)
            assert held.groups == 6
            seen.setdefault((number, rank), set()).add(tuple(held.rows.tolist()))
    assert all(len(answers) == 1 for answers in seen.values())
    given = list(itertools.chain.from_iterable(next(iter(answers)) for answers in seen.values()))
    assert sorted(given) == rows


def test_ranks_that_wait_are_all_answered_by_the_write_that_completes_their_batch(world: World) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    first = put(partition, [1, 1, 1])
    with pytest.raises(DeadlineError, match="4 groups"):
        share(partition, 0, 0)
    calls = [
        world.say("ledger", "lease", LeaseCall("phase", "train", 4, 4, 60.0, 60.0, share=Share(0, rank, 2)), Granted)
        for rank in (1, 0, 1)
    ]
    second = put(partition, [1])
    answers = [world.outcome(call) for call in calls]
    assert answers[0].rows.tolist() == answers[2].rows.tolist()
    assert sorted([*answers[0].rows[0], *answers[1].rows[0]]) == first + second


def test_a_batch_is_acknowledged_when_every_rank_has_said_so_once_or_more(partition: Partition) -> None:
    put(partition, [5] * 4)
    held = [share(partition, 0, rank) for rank in (0, 1, 1)]
    partition.acknowledge(held[0])
    partition.acknowledge(held[0])
    assert partition.stats().rows == 8
    assert partition.first_batch("train") == 0
    partition.acknowledge(held[1])
    assert partition.stats().rows == 0
    partition.acknowledge(held[2])
    assert partition.first_batch("train") == 1
    with pytest.raises(RunError, match="acknowledged by every rank") as told:
        share(partition, 0, 0)
    assert "begin with batch 1" in str(told.value)


def test_a_release_gives_back_the_shares_of_all_and_who_held_one_is_told(partition: Partition) -> None:
    rows = put(partition, [5] * 4)
    one, other = share(partition, 0, 0), share(partition, 0, 1)
    partition.acknowledge(one)
    partition.release(other)
    for late in (lambda: partition.acknowledge(one), lambda: partition.extend(other)):
        with pytest.raises(RunError, match="not held"):
            late()
    again = [share(partition, 0, rank) for rank in range(2)]
    assert sorted(itertools.chain.from_iterable(held.rows.tolist() for held in again)) == rows
    assert again[0].attempts.tolist() == [2] * 4


def test_a_rank_that_dies_gives_the_batch_back_though_others_hold_on(world: World, partition: Partition) -> None:
    put(partition, [5] * 8)
    alive, dead = share(partition, 0, 0, seconds=10.0), share(partition, 0, 1, seconds=10.0)
    ahead = share(partition, 1, 0, seconds=10.0)
    for _ in range(3):
        world.wait(4.0)
        if world.clock.now < 10:
            partition.extend(alive, 10.0)
    world.wait(1.0)
    for held in (alive, dead, ahead):
        with pytest.raises(RunError, match="not held"):
            partition.acknowledge(held)
    begun = share(partition, 0, 0, seconds=10.0)
    for _ in range(3):
        world.wait(4.0)
        partition.extend(begun, 10.0)
    come = share(partition, 0, 1, seconds=10.0)
    partition.acknowledge(begun)
    partition.acknowledge(come)
    assert partition.first_batch("train") == 1


def test_a_batch_that_is_given_back_takes_the_later_ones_along(partition: Partition) -> None:
    rows = put(partition, [5] * 8)
    held = {(batch, rank): share(partition, batch, rank) for batch in range(2) for rank in range(2)}
    partition.release(held[0, 1])
    for late in held.values():
        with pytest.raises(RunError, match="not held"):
            partition.extend(late)
    assert partition.stats().ready == {"train": 8}
    first = [row for rank in range(2) for row in share(partition, 0, rank).rows.tolist()]
    assert sorted(first) == rows[: 4 * SIZE], "in their order"


def test_a_rank_that_died_while_there_was_nothing_to_ask_for_gives_the_next_batch_back(
    world: World, partition: Partition
) -> None:
    first = put(partition, [5] * 4)
    for held in [share(partition, 0, rank, seconds=10.0) for rank in range(2)]:
        partition.acknowledge(held)
    world.wait(100.0)
    rows = put(partition, [5] * 4)
    alone = share(partition, 1, 0, seconds=10.0)
    for _ in range(2):
        world.wait(4.0)
        partition.extend(alone, 10.0)
    world.wait(3.0)
    with pytest.raises(RunError, match="not held"):
        partition.extend(alone, 10.0)
    begun = [share(partition, partition.first_batch("train"), rank, seconds=10.0) for rank in (1, 0, 1)]
    assert begun[0].rows.tolist() == begun[2].rows.tolist()
    assert sorted([*begun[0].rows, *begun[1].rows]) == rows != first
    world.wait(9.0)
    partition.acknowledge(begun[0])
    partition.acknowledge(begun[1])
    assert partition.stats().rows == 0


def test_a_rank_whose_successor_is_slow_to_start_ends_nothing_until_it_is_there(
    world: World, partition: Partition
) -> None:
    put(partition, [5] * 4)
    for rank in range(2):
        share(partition, 0, rank, seconds=10.0)
    world.wait(11.0)
    begun = share(partition, 0, 0, seconds=10.0)
    for _ in range(20):
        world.wait(5.0)
        partition.extend(begun, 10.0)
    partition.acknowledge(share(partition, 0, 1, seconds=10.0))
    partition.acknowledge(begun)
    assert partition.stats().rows == 0


def test_a_batch_is_held_no_longer_than_those_before_it(world: World, partition: Partition) -> None:
    """Another rank never came for the first, and this one is done with it."""
    put(partition, [5] * 8)
    partition.acknowledge(share(partition, 0, 0, seconds=10.0))
    ahead = share(partition, 1, 0, seconds=10.0)
    for _ in range(2):
        world.wait(4.0)
        partition.extend(ahead, 10.0)
    world.wait(3.0)
    with pytest.raises(RunError, match="not held"):
        partition.extend(ahead, 10.0)
    assert partition.stats().ready == {"train": 8}


@pytest.mark.parametrize("is_cut_anew", [True, False])
def test_a_rank_that_goes_on_behind_a_batch_that_was_given_back_is_told_to_begin_with_it(
    world: World, partition: Partition, is_cut_anew: bool
) -> None:
    """It has acknowledged its share, which was not all of the batch: the batch is anybody's again."""
    rows = put(partition, [5] * 8)
    done, _ = share(partition, 0, 0, seconds=10.0), share(partition, 0, 1, seconds=10.0)
    partition.acknowledge(done)
    world.wait(11.0)
    if is_cut_anew:
        share(partition, 0, 1, seconds=10.0)
    with pytest.raises(RunError, match="rank 0 asks for batch 1 of train, and was not given batch 0") as told:
        share(partition, 1, 0)
    assert "begin with batch 0" in str(told.value)
    begun = [share(partition, 0, rank) for rank in range(2)]
    assert sorted([*begun[0].rows, *begun[1].rows]) == rows[: 4 * SIZE]
    assert begun[0].attempts.tolist() == [2] * 4
    for held in begun:
        partition.acknowledge(held)
    assert partition.stats().rows == 4 * SIZE


def test_a_rank_that_skips_a_batch_is_told_which(partition: Partition) -> None:
    put(partition, [5] * 8)
    with pytest.raises(RunError, match="rank 0 asks for batch 3 of train, and was not given batch 0"):
        share(partition, 3, 0)
    for batch in range(2):
        share(partition, batch, 0)
    with pytest.raises(RunError, match="rank 1 asks for batch 1 of train, and was not given batch 0"):
        share(partition, 1, 1)


def test_a_rank_that_waits_for_a_batch_when_one_before_it_is_given_back_gets_none(
    world: World, partition: Partition
) -> None:
    put(partition, [5] * 4)
    held = [share(partition, 0, rank) for rank in range(2)]
    call = LeaseCall("phase", "train", 4, 4, 5.0, 60.0, share=Share(1, 0, 2))
    waiting = world.say("ledger", "lease", call, Granted)
    partition.release(held[1])
    put(partition, [5] * 8)
    with pytest.raises(DeadlineError):
        world.outcome(waiting)


def test_what_ranks_share_comes_back_when_their_consumer_is_known_to_be_gone() -> None:
    partition = PartitionLedger.make(SPEC, shard=0, number=0)
    partition.ledger.insert(8, 0, ("tokens",), nbytes=1, tokens=np.arange(8 * SIZE))

    def grant(batch: int, rank: int) -> list[int]:
        call = LeaseCall("phase", "train", 4, 4, 5.0, 60.0, share=Share(batch, rank, 2))
        granted = partition.grant(partition.check(call))
        assert granted is not None
        return granted.rows[0].tolist()

    before = [[grant(batch, rank) for rank in range(2)] for batch in range(2)]
    assert len(partition.forsake("train")) == 2
    assert partition.ledger.ready("train") == {0: 8}
    assert partition.first_batch("train") == 0
    assert [[grant(batch, rank) for rank in (1, 0)][::-1] for batch in range(2)] == before


def test_ranks_leave_the_order_to_the_ledger(partition: Partition) -> None:
    put(partition, [1] * 4)
    with pytest.raises(ContractError, match="shares batches, and has an order of its own"):
        partition.lease("train", 4, share=Share(0, 0, 2), order=lambda ready: np.arange(4), deadline=SHORT)


def test_a_rank_is_never_left_without_a_group(partition: Partition) -> None:
    put(partition, [1] * 5)
    with pytest.raises(ContractError, match="1 groups for 2 ranks"):
        share(partition, 0, 0, groups=1)
    held = [share(partition, 0, rank, ranks=3, groups=6, at_least=1) for rank in range(3)]
    assert [len(rows) for rows in held] == [SIZE] * 3, "of six groups, three are left for the next batch"


def test_the_number_of_ranks_changes_between_batches_and_not_within_one(partition: Partition) -> None:
    put(partition, [1] * 12)
    held = [share(partition, 0, rank) for rank in range(2)]
    with pytest.raises(ContractError, match="2 ranks share the batches of train, and rank 0 says 4"):
        share(partition, 1, 0, ranks=4)
    for rows in held:
        partition.acknowledge(rows)
    assert len({share(partition, 1, rank, ranks=4).rows[0] for rank in range(4)}) == 4


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (Share(-1, 0, 2), "batch -1"),
        (Share(0, 2, 2), "rank 2 of 2"),
        (Share(0, -1, 2), "rank -1 of 2"),
        (Share(0, 0, 0), "rank 0 of 0"),
    ],
)
def test_a_share_of_nothing_sensible_is_refused(partition: Partition, wrong: Share, said: str) -> None:
    put(partition, [1] * 4)
    with pytest.raises(ContractError) as told:
        partition.lease("train", 4, share=wrong, deadline=SHORT)
    assert said in str(told.value)


def test_log_normal_lengths_are_within_five_per_cent_of_each_other_where_equal_counts_are_not(
    partition: Partition,
) -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, size=256).astype(int)
    put(partition, lengths.tolist())
    held = [share(partition, 0, rank, 8, 256) for rank in range(8)]
    tokens = [int(rows.tokens.sum()) for rows in held]
    counted = SIZE * lengths.reshape(8, 32).sum(axis=1)
    assert sum(tokens) == counted.sum()
    assert max(tokens) / np.mean(tokens) < 1.05 < counted.max() / counted.mean()
    assert {len(rows) for rows in held} == {32 * SIZE}


def test_processes_of_ranks_stream_the_same_steps_each_within_its_budget(services: Services) -> None:
    services.unit()
    partition = services.plane().create(SPEC)
    rows = put(partition, np.random.default_rng(1).integers(1, 40, size=48).tolist())
    stepped = threading.Barrier(4)

    def train(rank: int) -> list[list[int]]:
        steps = []
        with Stream(
            lambda: services.plane().partition("phase"), "train", step_groups=16, token_budget=160, rank=rank, ranks=2
        ) as stream:
            for _ in range(3):
                batches = list(stream.step(deadline=60))
                assert all(int(batch.ragged("tokens").lengths.sum()) <= 160 for batch in batches)
                steps += [batch.rows.tolist() for batch in batches]
                stepped.wait(60)  # the optimiser step, in which all take part
                stream.acknowledge()
        return steps

    with ThreadPoolExecutor(4) as threads:
        zero, zero_too, one, one_too = threads.map(train, (0, 0, 1, 1))
    assert zero == zero_too
    assert one == one_too
    assert len(zero) == len(one)
    assert sorted(itertools.chain.from_iterable(zero + one)) == rows
    assert partition.stats().rows == 0


def test_ranks_that_begin_again_are_given_the_step_that_not_all_had_acknowledged(services: Services) -> None:
    services.unit()
    partition = services.plane().create(SPEC)
    rows = put(partition, [5] * 8)

    def stream(rank: int) -> Stream:
        connect = lambda: services.plane().partition("phase")  # noqa: E731 - a thread's own view
        return Stream(connect, "train", step_groups=4, rank=rank, ranks=2)

    zero, one = stream(0), stream(1)
    for ranks in (zero, one):
        list(ranks.step(deadline=30))
    zero.acknowledge()
    for rank in (zero, one):
        rank.close()
    assert partition.first_batch("train") == 0
    with stream(1) as again, stream(0) as other:
        given = [row for rank in (again, other) for batch in rank.step(deadline=30) for row in batch.rows.tolist()]
        again.acknowledge()
        other.acknowledge()
    assert sorted(given) == rows[:8]
    assert partition.first_batch("train") == 1
