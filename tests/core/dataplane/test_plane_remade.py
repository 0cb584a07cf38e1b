"""Partitions that end and others of their name, and words between unit and ledger that are lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, DataPlane, PartitionSpec, Rows
from headrace.dataplane.messages import Noted, Put, Unkept
from headrace.errors import ContractError, RunError
from support.plane_world import LEDGER, World

FLOATS = PartitionSpec("phase", {"x": ColumnSchema("float32")}, {"train": ("x",)}, 2)
UNMEASURED = PartitionSpec("phase", {"x": ColumnSchema("int32", ragged=True)}, {"train": ("x",)}, 2)
WORDS = PartitionSpec("phase", {"x": ColumnSchema("int32", ragged=True)}, {"train": ("x",)}, 2, "x")
OTHER = PartitionSpec("other", {"x": ColumnSchema("float32")}, {"train": ("x",)}, 2)
ONES = {"x": np.ones(2, np.float32)}


@pytest.fixture(params=["own", "remote"])
def world(request: pytest.FixtureRequest) -> Iterator[World]:
    running = World(own=request.param == "own")
    if request.param == "remote":
        running.unit()
    yield running
    running.close()


@pytest.fixture
def plane(world: World) -> DataPlane:
    return world.plane()


def test_a_partition_of_the_same_name_may_have_another_schema(plane: DataPlane) -> None:
    plane.create(FLOATS).put(ONES)
    plane.remove("phase")
    words = Ragged.from_arrays([np.arange(3, dtype=np.int32), np.arange(5, dtype=np.int32)])
    partition = plane.create(WORDS)
    partition.put({"x": words})
    held, batch = partition.take("train", 1)
    assert held.tokens.tolist() == [3, 5]
    assert [part.tolist() for part in batch.ragged("x")] == [[0, 1, 2], [0, 1, 2, 3, 4]]
    with pytest.raises(ContractError, match="is ragged int32"):
        partition.put(ONES)


def test_a_schema_that_still_fits_is_asked_for_anew_when_the_partition_is_another(plane: DataPlane) -> None:
    words = {"x": Ragged.from_arrays([np.zeros(3, np.int32), np.zeros(5, np.int32)])}
    plane.create(UNMEASURED).put(words)
    plane.remove("phase")
    partition = plane.create(WORDS)
    partition.put(words)
    assert partition.lease("train", 1).tokens.tolist() == [3, 5]


def test_rows_of_a_partition_that_is_removed_are_gone_and_their_memory_too(plane: DataPlane) -> None:
    other, partition = plane.create(OTHER), plane.create(FLOATS)
    for _ in range(3):
        partition.put(ONES)
    held = partition.lease("train", 1)
    given_up = partition.lease("train", 1)
    partition.drop([int(given_up.rows[0]) // 2])
    plane.remove("phase")
    assert other.unit_stats()[0].nbytes == 0
    with pytest.raises(ContractError, match="no partition 'phase'"):
        partition.get(held)
    with pytest.raises(ContractError, match="no partition 'phase'"):
        plane.remove("phase")


def test_no_two_partitions_have_a_row_in_common_whichever_end(plane: DataPlane) -> None:
    plane.create(FLOATS)
    second = plane.create(OTHER)
    plane.remove("phase")
    third = plane.create(FLOATS)
    one, two = second.put(ONES), third.put({"x": np.full(2, 7, np.float32)})
    assert not set(one.tolist()) & set(two.tolist())
    assert second.take("train", 1)[1].dense("x").tolist() == [1, 1]
    assert third.take("train", 1)[1].dense("x").tolist() == [7, 7]


def test_a_late_word_about_rows_of_a_partition_that_ended_changes_nothing_in_the_next(plane: DataPlane) -> None:
    first = plane.create(FLOATS)
    first.put(ONES)
    late = first.lease("train", 1)
    plane.remove("phase")
    second = plane.create(FLOATS)
    second.put(ONES)
    held = second.lease("train", 1)
    for speak in (first.acknowledge, first.release, first.extend):
        with pytest.raises(RunError, match="is not held"):
            speak(late)
    second.acknowledge(held)


def test_whoever_asks_for_the_losses_of_a_partition_that_ended_is_not_told_of_those_of_the_next(
    plane: DataPlane,
) -> None:
    first = plane.create(FLOATS)
    plane.remove("phase")
    plane.create(FLOATS)
    with pytest.raises(ContractError, match="partition 'phase' is another by now: it was removed"):
        first.lost()


def test_a_late_or_repeated_word_that_rows_were_not_kept_changes_nothing(world: World, plane: DataPlane) -> None:
    first = plane.create(FLOATS)
    (group, _), rows = first.put(ONES) // 2, first.put(ONES)
    unkept = Unkept(1, "phase", first._made, [int(group), 10**9], False)
    for _ in range(2):
        world.outcome(world.say(LEDGER, "unkept", unkept))
    assert first.lost() == [group]
    assert first.lease("train", 2, at_least=1).rows.tolist() == rows.tolist()
    plane.remove("phase")
    world.outcome(world.say(LEDGER, "unkept", unkept))
    second = plane.create(FLOATS)
    (again, _) = second.put(ONES) // 2
    world.outcome(world.say(LEDGER, "unkept", Unkept(1, "phase", first._made, [int(again)], False)))
    assert (second.lost(), second.stats().rows) == ([], 2)


@pytest.mark.parametrize("lost", [1, 3])
def test_rows_whose_answer_from_the_ledger_is_lost_are_kept_once(lost: int) -> None:
    world = World()
    unit = world.unit()
    plane = world.plane()
    partition = plane.create(FLOATS)
    methods = world._services[LEDGER]
    said: list[Any] = []
    note = methods["note"]

    def swallowed(notes: Any) -> Any:
        said.append(notes)
        answer = note.call(notes)
        return answer if len(said) > lost else world.clock.create_future()

    methods["note"] = replace(note, call=swallowed)
    flight = world.say(unit, "put", Put("phase", None, ONES, 0), Noted)  # type: ignore[arg-type]
    world.wait(60.0 * lost + 1)
    first = world.outcome(flight).first
    assert len(said) == lost + 1
    assert partition.stats().rows == 2
    held: Rows = partition.lease("train", 1)
    assert held.rows.tolist() == [first, first + 1]
    assert partition.get(held).dense("x").tolist() == [1, 1]
    partition.acknowledge(held)
    assert partition.unit_stats()[0].nbytes == 0
    partition.put(ONES)
    assert partition.stats().rows == 2
    world.close()
