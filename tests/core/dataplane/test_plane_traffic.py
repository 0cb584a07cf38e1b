"""What travels between the processes of a data plane, counted in bytes, and in which order rows are given."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import Array, Ragged
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.errors import DeadlineError
from support.plane_world import LEDGER, World

COLUMNS = {"tokens": ColumnSchema("int32", ragged=True), "reward": ColumnSchema("float32")}
SPEC = PartitionSpec("phase", COLUMNS, {"train": ("tokens", "reward")}, 2, "tokens")
OVERHEAD = 400
"""Bytes of a message around its arrays: names, dtypes, shapes."""


@pytest.fixture
def partition(world: World) -> Partition:
    world.unit()
    return world.plane().create(SPEC)


def put(partition: Partition, lengths: list[int], rewards: list[float] | None = None) -> Array:
    tokens = Ragged.from_arrays([np.arange(length, dtype=np.int32) for length in lengths], dtype=np.int32)
    reward = np.array(rewards or [0.0] * len(lengths), dtype=np.float32)
    return partition.put({"tokens": tokens, "reward": reward})


def lognormal_lengths(count: int) -> list[int]:
    lengths: list[int] = np.random.default_rng(0).lognormal(4.0, 1.0, count).astype(int).tolist()
    return lengths


@pytest.mark.parametrize("length", [1, 100_000])
def test_AFL_3_the_ledger_hears_what_is_where_and_no_payload(world: World, partition: Partition, length: int) -> None:
    put(partition, [length] * 4)
    held = partition.lease("train", 2)
    partition.acknowledge(held)
    world.settle()
    said = sum(count for (address, _), count in world.bytes_to.items() if address == LEDGER)
    heard = sum(count for (address, _), count in world.bytes_from.items() if address == LEDGER)
    assert said + heard < 8 * OVERHEAD


def test_AFL_3_a_consumer_that_comes_late_is_given_all_that_was_put_before(world: World, partition: Partition) -> None:
    rows = np.concatenate([put(partition, [3, 4]) for _ in range(20)])
    late = world.plane().partition("phase")
    assert late.lease("train", 20).rows.tolist() == rows.tolist()


def test_AFL_4_a_read_moves_the_columns_it_names(world: World, partition: Partition) -> None:
    put(partition, [50_000, 50_000])
    held = partition.lease("train", 1)
    assert partition.get(held, ["reward"]).dense("reward").tolist() == [0.0, 0.0]
    assert world.bytes_from["unit-1", "get"] < OVERHEAD
    batch = partition.get(held)
    assert sum(len(row) for row in batch.ragged("tokens")) == 100_000


def test_AFL_4_ragged_values_travel_without_padding(world: World, partition: Partition) -> None:
    lengths = [100_000, *[1] * 99]
    put(partition, lengths)
    held = partition.lease("train", 50)
    batch = partition.get(held, ["tokens"])
    assert batch.ragged("tokens").lengths.tolist() == lengths
    offsets_and_rows = 8 * (len(lengths) + 1) + 8 * len(lengths)
    assert world.bytes_from["unit-1", "get"] < 4 * sum(lengths) + offsets_and_rows + OVERHEAD


def test_RLX_12_what_is_computed_of_a_group_is_the_same_streamed_or_whole(world: World, partition: Partition) -> None:
    """Groups come whole, so the mean and deviation of a group are those of the batch that has all groups at once."""
    rewards = np.random.default_rng(1).normal(size=40).astype(np.float32).tolist()
    put(partition, lognormal_lengths(40), rewards)
    streamed: list[float] = []
    while len(streamed) < 40:
        held = partition.lease("train", 20, at_least=1, token_budget=300)
        streamed += normalised(partition.get(held, ["reward"]).dense("reward"))
        partition.acknowledge(held)
    assert streamed == normalised(np.array(rewards, dtype=np.float32))


def normalised(rewards: Array) -> list[float]:
    groups = rewards.reshape(-1, 2)
    scaled = (groups - groups.mean(axis=1, keepdims=True)) / (groups.std(axis=1, keepdims=True) + 1e-6)
    values: list[float] = scaled.reshape(-1).tolist()
    return values


def test_DORA_11_at_every_moment_the_lengths_given_are_those_that_were_ready_first(
    world: World, partition: Partition
) -> None:
    """Whatever the budgets and however many are asked for: nothing is given earlier for being short."""
    lengths, given = lognormal_lengths(400), list[int]()
    for start in range(0, 400, 8):
        put(partition, lengths[start : start + 8])
        for budget in (64, 0, 512):
            try:
                held = partition.lease("train", 3, at_least=1, token_budget=budget, deadline=1e-6)
            except DeadlineError:
                break
            given += held.tokens.tolist()
            assert given == lengths[: len(given)]
            partition.acknowledge(held)
    while len(given) < 400:
        held = partition.lease("train", 7, at_least=1)
        given += held.tokens.tolist()
    assert given == lengths
