"""Mistakes and deaths of one producer, consumer or storage unit, which cost nobody else."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec, Rows
from headrace.dataplane.messages import LostCall, Note, Noted, Notes, Put, Unkept
from headrace.errors import ContractError, DeadlineError, LostRowsError, RunError
from support.plane_world import LEDGER, World

COLUMNS = {"a": ColumnSchema("float32"), "b": ColumnSchema("float32")}
READS: dict[str, tuple[str, ...]] = {"x": ("a",), "y": ("a", "b")}


def create(world: World, *, group_size: int = 1) -> Partition:
    return world.plane().create(PartitionSpec("p", COLUMNS, READS, group_size))


def column(count: int) -> Array:
    return np.arange(count, dtype=np.float32)


def put_together(world: World, unit: str, counts: list[int]) -> list[asyncio.Future[Any]]:
    """Puts of new rows that the ledger hears of in few words."""
    calls = [
        world.client(unit).submit(
            "put", Put("p", None, {"a": column(count), "b": column(count)}, 0), reply=Noted, deadline=5
        )
        for count in counts
    ]
    world.settle()
    return calls


def test_a_put_of_half_a_group_is_refused_and_those_that_are_told_with_it_are_kept(world: World) -> None:
    unit = world.unit()
    partition = create(world, group_size=2)
    partition.put({"a": column(2), "b": column(2)})
    calls = put_together(world, unit, [2, 2, 3, 2])
    assert [type(call.exception()) for call in calls] == [type(None), type(None), ContractError, type(None)]
    held = partition.lease("y", partition.stats().ready["y"])
    assert len(held) == 8
    assert partition.get(held).dense("a").tolist() == [0, 1] * 4, "what is offered can be read"


SILENCE = 7
"""Seconds after which a unit that is gone is missed."""


def test_a_unit_that_was_given_up_is_not_believed_any_more(world: World) -> None:
    world.unit()
    stalled = world.unit()
    partition = create(world)
    first, second = partition.put({"a": column(1)}), partition.put({"a": column(1)})
    world.stall(stalled, SILENCE)
    assert partition.lost() == second.tolist()
    with pytest.raises(RunError, match="storage unit 2 is not in service"):
        world.outcome(world.say(stalled, "put", Put("p", None, {"a": column(1)}, 0), Noted))
    assert partition.lease("x", 2, at_least=1).rows.tolist() == first.tolist()


def test_what_a_unit_says_that_never_joined_is_refused(world: World) -> None:
    world.unit()
    partition = create(world)
    partition.put({"a": column(1)})
    before = partition.stats()
    note = Note("p", None, 1, ("a",), np.ones(1, np.int64), np.zeros(1, np.int64), 0)
    for unit in (0, 99, -1):
        for method, said in (("note", Notes(unit, [note])), ("unkept", Unkept(unit, "p", 1, [1], True))):
            with pytest.raises(RunError, match=f"storage unit {unit} is not in service"):
                world.outcome(world.say(LEDGER, method, said, list[Noted]))
    assert partition.stats() == before


def test_a_unit_that_comes_back_empty_at_its_old_address_is_another_one(world: World) -> None:
    unit = world.unit()
    partition = create(world)
    rows = partition.put({"a": column(2)})
    world.lose(unit)  # killed, and started again before it is missed
    assert world.unit(address=unit) == unit
    assert partition.lost() == rows.tolist()
    world.wait(SILENCE)
    again = partition.put({"a": column(2)})
    held = partition.lease("x", 3, at_least=1)
    assert held.rows.tolist() == again.tolist()
    assert partition.get(held).dense("a").tolist() == [0, 1]
    partition.release(held)
    partition.drop(again.tolist())
    world.settle()
    assert world.storages[unit].stats().nbytes == 0


def spread(world: World) -> tuple[Partition, str, list[int]]:
    """A group with a column at each of two units, of which the first is named."""
    first = world.unit()
    world.unit()
    partition = create(world)
    rows = partition.put({"a": column(1)})
    partition.put({"b": column(1)}, rows=rows)
    return partition, first, rows.tolist()


def nbytes(world: World) -> int:
    """At the units that live."""
    world.settle()
    return sum(storage.stats().nbytes for storage in world.storages.values())


def test_what_lost_groups_have_at_other_units_is_deleted(world: World) -> None:
    partition, unit, rows = spread(world)
    world.lose(unit)
    world.wait(SILENCE)
    assert partition.lost() == rows
    assert nbytes(world) == 0


@pytest.mark.parametrize("end", ["acknowledge", "release", "expire"])
def test_what_is_read_under_a_lease_is_deleted_when_the_last_one_ends(world: World, end: str) -> None:
    partition, unit, _ = spread(world)
    first, second = partition.lease("x", 1, seconds=100.0), partition.lease("y", 1, seconds=20.0)
    world.lose(unit)
    world.wait(SILENCE)
    assert nbytes(world) == 4
    assert partition.get(second, ["b"]).dense("b").tolist() == [0]
    with pytest.raises(LostRowsError):
        partition.acknowledge(first)
    assert nbytes(world) == 4
    if end == "expire":
        world.wait(20.0)
    else:
        with suppress(LostRowsError):
            getattr(partition, end)(second)
    assert nbytes(world) == 0


def test_rows_that_leave_while_their_unit_hears_that_it_may_keep_them_are_not_kept(world: World) -> None:
    unit = world.unit()
    partition = create(world)
    (row,) = partition.put({"a": column(1)}).tolist()
    more = world.client(unit).submit("put", Put("p", np.array([row]), {"b": column(1)}, 0), reply=Noted, deadline=5)
    world.client(unit).submit("delete", np.array([row]), deadline=5)
    world.settle()
    assert more.done()
    assert nbytes(world) == 0


def test_lost_groups_of_which_one_was_told_that_died_are_told_to_the_next(world: World) -> None:
    partition, unit, rows = spread(world)
    died = [
        world.client(LEDGER).submit("lost", LostCall("p", 0, 50.0, 0), reply=list[int], deadline=60) for _ in range(2)
    ]
    world.settle()
    world.lose(unit)
    world.wait(SILENCE)
    assert [call.result() for call in died] == [rows, rows]
    assert partition.lost() == rows
    assert partition.lost(wait=1.0) == [], "each is told once"


def test_what_is_no_array_is_refused_with_its_kind(world: World) -> None:
    world.unit()
    with pytest.raises(ContractError, match="a: list"):
        create(world).put({"a": [1.0]})  # type: ignore[dict-item]  # as somebody might


@pytest.mark.parametrize("spreading", [True, False])
def test_a_column_that_its_consumer_does_not_read_is_refused_wherever_it_is(world: World, spreading: bool) -> None:
    if spreading:
        partition, _, _ = spread(world)
    else:
        world.unit()
        partition = create(world)
        partition.put({"a": column(1), "b": column(1)})
    held = partition.lease("x", 1)
    for name in ("b", "absent"):
        with pytest.raises(ContractError, match=f"'x' of partition 'p' asks for '{name}'"):
            partition.get(held, ["a", name])
    assert partition.get(held).dense("a").tolist() == [0]


def test_a_call_does_not_outwait_its_deadline_though_the_ledger_is_gone_too(world: World) -> None:
    unit = world.unit()
    partition = create(world)
    partition.put({"a": column(1)})
    held = partition.lease("x", 1)
    world.serve(LEDGER, None)
    world.serve(unit, None)
    for call, answers in (
        (lambda: partition.put({"a": column(1)}, deadline=2.0), 1),
        (lambda: partition.put({"a": column(1)}, deadline=2.0), 1),
        (lambda: partition.get(held, deadline=2.0), 2),
        (lambda: partition.unit_stats(deadline=2.0), 1),
    ):
        before = world.clock.now
        with pytest.raises(DeadlineError):
            call()
        assert world.clock.now - before <= answers * 2.0 + 0.5


def test_a_put_that_names_a_row_twice_is_refused_and_changes_nothing(world: World) -> None:
    world.unit()
    partition = create(world, group_size=2)
    rows = partition.put({"a": column(2)})
    before = partition.stats()
    for named in ([rows[0], rows[0]], [rows[1], rows[0], rows[1]]):
        with pytest.raises(ContractError, match=r"names row \d+ twice"):
            partition.put({"b": column(len(named))}, rows=np.array(named))
    for odd in (rows.astype(float), rows.astype(np.int32), rows[None]):
        with pytest.raises(ContractError, match=r"name them as int64 \[n\]"):
            partition.put({"b": column(len(odd))}, rows=odd)
    for version in (-1, 1 << 63):
        with pytest.raises(ContractError, match="policy version"):
            partition.put({"a": column(2)}, version=version)
    assert (partition.stats(), partition.lost()) == (before, [])
    partition.put({"b": column(2)}, rows=rows)
    assert partition.lease("y", 1).rows.tolist() == rows.tolist()


def test_dropped_groups_are_deleted_those_on_lease_when_it_ends(world: World) -> None:
    world.unit()
    partition = create(world)
    rows = partition.put({"a": column(3)}).tolist()
    held = partition.lease("x", 1)
    partition.drop([rows[1], rows[0], rows[1]])
    assert (partition.stats().rows, partition.stats().nbytes, nbytes(world)) == (1, 4, 8)
    assert partition.get(held).dense("a").tolist() == [0]
    partition.acknowledge(held)
    assert partition.lease("x", 3, at_least=1).rows.tolist() == [rows[2]]
    assert nbytes(world) == 4


def test_what_was_wrong_with_a_read_is_said_though_its_lease_cannot_be_given_back(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: Rows) -> None:
        raise RunError("lease 0 is not held")

    unit = world.unit()
    partition = create(world)
    partition.put({"a": column(1)})
    world.storages[unit].close()
    monkeypatch.setattr(partition, "release", fails)
    with pytest.raises(LostRowsError, match="rows 1 of partition 'p', with a"):
        partition.take("x", 1)


def test_more_columns_than_a_ledger_can_keep_apart_are_refused_when_a_partition_is_made(world: World) -> None:
    columns = {f"c{number}": ColumnSchema("float32") for number in range(64)}
    with pytest.raises(ContractError, match="64 columns of partition 'p'; a ledger keeps at most 63"):
        world.plane().create(PartitionSpec("p", columns, {"x": ("c0",)}))
