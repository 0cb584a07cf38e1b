"""A ledger that was started again gives the ids again that were given before: nobody takes these rows for those."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Array
from headrace.dataplane import ColumnSchema, PartitionSpec
from headrace.errors import ContractError, RunError
from support.plane_world import World

SPEC = PartitionSpec(
    "phase",
    {"x": ColumnSchema("float32"), "reward": ColumnSchema("float32")},
    {"score": ("x",), "train": ("x", "reward")},
)
ANOTHER_LIFE = "is another by now: .* its ledger was started again"


def ones(count: int) -> Array:
    return np.ones(count, np.float32)


@pytest.fixture(params=["own", "remote", "sharded"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    running = World(own=request.param == "own", shards=2 if request.param == "sharded" else 1)
    if request.param != "own":
        running.unit()
    yield running
    running.close()


@pytest.mark.parametrize("restored", [False, True])
def test_what_is_held_of_a_ledger_s_earlier_life_touches_no_row_of_its_next(
    world: World, tmp_path: Path, restored: bool
) -> None:
    scorer = world.plane().create(SPEC)
    world.plane().snapshot(tmp_path / "file")
    before = [scorer.put({"x": ones(2)}) for _ in world.ledgers]
    held = scorer.lease("score", 2 * len(before))
    world.restart(*(world.ledgers if restored else world.ledgers[-1:]))
    if restored:
        world.plane().restore(tmp_path / "file")
    partition = world.plane().create(SPEC)
    rows = np.concatenate([partition.put({"x": 5 * ones(2)}) for _ in world.ledgers])
    assert set(before[-1].tolist()) <= set(rows.tolist()), "the ids are the same"

    refused: list[Callable[[], object]] = [
        lambda: scorer.put({"reward": ones(2)}, rows=before[-1]),
        lambda: scorer.put({"x": ones(2)}),
        lambda: scorer.drop(before[-1].tolist()),
        lambda: scorer.lease("score", len(rows), deadline=1.0),
        lambda: scorer.get(held),
        scorer.stats,
    ]
    if len(world.ledgers) == 1:
        refused += [lambda: scorer.first_batch("train")]
    for call in refused:
        with pytest.raises(ContractError, match=ANOTHER_LIFE):
            call()
    assert partition.stats().ready == {"score": len(rows), "train": 0}
    if len(world.ledgers) == 1:
        for end in (scorer.acknowledge, scorer.release, scorer.extend):
            with pytest.raises(RunError, match="is not held"):
                end(held)


def test_groups_of_a_partition_that_was_removed_are_not_dropped_in_the_next_of_its_name(world: World) -> None:
    first = world.plane().create(SPEC)
    world.plane().remove("phase")
    second = world.plane().create(SPEC)
    rows = second.put({"x": ones(2)})
    with pytest.raises(ContractError, match=ANOTHER_LIFE):
        first.drop(rows.tolist())
    assert second.stats().rows == 2
