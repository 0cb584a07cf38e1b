"""A data plane that has been used for long is as large as a new one; ``tests/soak/data_plane_memory.py`` asks the
processes."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.errors import DeadlineError
from headrace.flow.leases import Leases
from headrace.flow.ledger import Ledger
from support.plane_world import World

READS: dict[str, tuple[str, ...]] = {"score": ("tokens",), "train": ("tokens", "reward")}
SPEC = PartitionSpec(
    "phase", {"tokens": ColumnSchema("int32", ragged=True), "reward": ColumnSchema("float32")}, READS, 4, "tokens"
)


def size_of(ledger: Ledger) -> int:
    """Bytes of its arrays, and entries of what is no array."""
    tables = sum(column.nbytes for column in ledger._groups.columns.values())
    rings = sum(len(ring._items) for who in ledger._consumers.values() for ring in who.ready._rings.values())
    return tables + rings + len(ledger.leases._held)


def test_a_ledger_s_arrays_are_as_large_after_two_thousand_cycles_as_at_first() -> None:
    ledger = Ledger(group_size=4, columns=("tokens", "reward"), consumers=READS)
    empty = size_of(ledger)
    for cycle in range(2000):
        first = ledger.open_many(8, cycle // 10)
        rows = np.arange(4 * first, 4 * (first + 8))
        ledger.write(rows, ("tokens",), nbytes=400, tokens=100, unit=1)
        ledger.write(rows, ("reward",), nbytes=4, unit=2)
        if cycle % 7 == 0:
            ledger.drop(first + 3)
        for consumer in READS:
            refused = ledger.lease(consumer, 5, deadline=cycle)
            assert refused is not None
            ledger.release(refused.lease)
            held = ledger.lease(consumer, 8, deadline=cycle, at_least=1)
            assert held is not None
            ledger.acknowledge(held.lease)
        ledger.expire(cycle)
    assert size_of(ledger) == empty
    assert (ledger.nbytes, ledger.buffered) == (0, 0)


def test_leases_that_ended_are_forgotten_however_far_their_deadline() -> None:
    leases, groups = Leases(), np.arange(1)
    held = [leases.grant("train", groups, deadline) for deadline in (7.0, 3.0, 5.0)]
    for number in range(1000):
        leases.end(leases.grant("train", groups, 1e9 + number).lease)
        leases.extend(held[2].lease, 5.0 + number)
    assert len(leases) == 3
    assert len(leases._deadlines) < 100
    assert [leases.end(lease).lease for lease in leases.due(10.0)] == [held[1].lease, held[0].lease]
    assert [leases.end(lease).lease for lease in leases.due(2e9)] == [held[2].lease]


@pytest.fixture
def partition(world: World) -> Partition:
    world.unit()
    world.unit()
    return world.plane().create(SPEC)


def cycle(partition: Partition) -> None:
    """New rows, one column after the other, of which some are dropped, and everything is acknowledged."""
    values = Ragged.from_arrays([np.zeros(10, np.int32)] * 32)
    rows = partition.put({"tokens": values})
    partition.put({"reward": np.zeros(32, np.float32)}, rows=rows)
    partition.drop([int(rows[0]) // 4])
    for consumer in READS:
        held, batch = partition.take(consumer, 7)
        assert len(batch) == len(held) == 28
        partition.acknowledge(held)
    with pytest.raises(DeadlineError):
        partition.lease("train", 1, deadline=1e-6)


def test_after_two_hundred_cycles_nothing_is_kept_anywhere(world: World, partition: Partition) -> None:
    for _ in range(200):
        cycle(partition)
    world.settle()
    assert [storage.stats().nbytes for storage in world.storages.values()] == [0, 0]
    assert (partition.stats().rows, partition.stats().nbytes, partition.stats().leases) == (0, 0, 0)
