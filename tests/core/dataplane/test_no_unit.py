"""Puts where there is no storage unit: one may come within their deadline."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.errors import DeadlineError
from support.plane_world import LEDGER, World

SPEC = PartitionSpec("p", {"x": ColumnSchema("float32")}, {"train": ("x",)})


def put(partition: Partition, deadline: float, once: str = "") -> list[int]:
    return partition.put({"x": np.ones(1, np.float32)}, deadline=deadline, once=once).tolist()


def test_a_put_before_there_is_a_unit_waits_for_one_and_goes_on(world: World) -> None:
    partition = world.plane().create(SPEC)
    world.unit_after(20, "unit-1")
    rows = put(partition, 30)
    assert 20 <= world.clock.now < 21
    assert partition.lease("train", 1).rows.tolist() == rows


@pytest.mark.parametrize("once", ["", "a name"])
def test_a_put_whose_only_unit_is_gone_waits_for_the_next_and_is_there_once(world: World, once: str) -> None:
    unit = world.unit()
    partition = world.plane().create(SPEC)
    put(partition, 60)
    world.lose(unit)
    began = world.clock.now
    world.unit_after(20, unit)
    rows = put(partition, 60, once)
    assert 20 <= world.clock.now - began < 21
    assert partition.lease("train", 2, at_least=1).rows.tolist() == rows


@pytest.mark.parametrize("deadline", [2.0, 30.0])
def test_a_put_that_no_unit_comes_for_ends_within_its_deadline_and_says_for_how_long_it_waited(
    world: World, deadline: float
) -> None:
    partition = world.plane().create(SPEC)
    with pytest.raises(DeadlineError, match="no storage unit is in service, and none came within") as told:
        put(partition, deadline)
    assert 0.7 * deadline <= world.clock.now <= deadline
    assert "start one" in told.value.fix
    assert 0 < world.bytes_to[LEDGER, "units"] < 20, "it was asked once"
    world.unit()
    assert put(partition, deadline), "the next finds one"
