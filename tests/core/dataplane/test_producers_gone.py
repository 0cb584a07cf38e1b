"""Producers that are killed, or give up, before what they put is kept."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec
from headrace.dataplane.messages import Described, Noted, Put, UnitFigures
from headrace.errors import DeadlineError
from support.data_plane import Services, soon
from support.forks import Fork
from support.plane_world import World

SPEC = PartitionSpec("phase", {"reward": ColumnSchema("float64")}, {"train": ("reward",)})
ROWS = 8
"""That a unit has room for."""
CAPACITY = 8 * ROWS


def put(partition: Partition, count: int) -> list[int]:
    rows: list[int] = partition.put({"reward": np.zeros(count)}, deadline=10).tolist()
    return rows


def figures(services: Services) -> UnitFigures:
    """Of the unit, by a connection made now: it has heard of those that ended before."""
    plane = services.plane()
    (unit,) = plane.client().call("describe", SPEC.name, reply=Described, deadline=10).units
    return plane.client(unit).call("figures", reply=UnitFigures, deadline=10)


def producer(services: Services, name: str, count: int) -> Fork:
    """Puts new rows, for which there is no room."""
    made = Fork(lambda: put(DataPlane(services.ledger).partition(name), count))
    soon(lambda: figures(services).waiting == 1)
    return made


@pytest.mark.parametrize("name", ["phase", "the first of its partition"])
def test_what_a_producer_that_was_killed_waited_to_store_is_never_stored(services: Services, name: str) -> None:
    services.unit(capacity=CAPACITY)
    partition = services.plane().create(SPEC)
    put(partition, ROWS)
    theirs = services.plane().create(PartitionSpec(name, SPEC.columns, SPEC.consumers))
    producer(services, name, 4).kill()
    figures(services)
    partition.acknowledge(partition.lease("train", ROWS))
    soon(lambda: figures(services).waiting == 0)
    assert figures(services).rows == partition.stats().rows == theirs.stats().rows == 0
    assert len(put(partition, ROWS)) == ROWS


def test_what_a_producer_that_lives_waits_to_store_is_stored_when_there_is_room(services: Services) -> None:
    services.unit(capacity=CAPACITY)
    partition = services.plane().create(SPEC)
    first = put(partition, ROWS)
    waiting = producer(services, SPEC.name, 1)
    partition.acknowledge(partition.lease("train", ROWS))
    assert waiting.said() == f"returned [{first[-1] + 1}]"
    assert partition.stats().rows == 1


def test_one_that_was_killed_while_it_waited_for_much_room_holds_up_nobody_who_needs_little(
    services: Services,
) -> None:
    services.unit(capacity=CAPACITY)
    partition = services.plane().create(SPEC)
    put(partition, ROWS // 2)
    producer(services, SPEC.name, ROWS).kill()
    figures(services)
    assert len(put(partition, ROWS // 2)) == ROWS // 2


def test_what_was_given_up_before_the_ledger_heard_of_it_is_not_stored(world: World) -> None:
    """The ledger is busy, and its producer, who will put it again, has heard that it did not answer."""
    unit = world.unit()
    partition = world.plane().create(SPEC)
    put(partition, 1)
    answer_now = world.hold("note")
    patient = world.say(unit, "put", Put("phase", None, {"reward": np.zeros(1)}, 0), Noted)
    with pytest.raises(DeadlineError):
        partition.put({"reward": np.zeros(1)}, deadline=0.5)
    answer_now()
    world.outcome(patient)
    assert partition.stats().rows == 2
    put(partition, 1)
    assert partition.stats().rows == 3
