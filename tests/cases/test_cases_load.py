"""Cases H07 and J02: no instance idles beside a queue, and what is buffered is bounded."""

from __future__ import annotations

import gc
import heapq
import itertools
import tracemalloc
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.contract import Batch, NoSettings, Ragged
from headrace.flow import Flow, Ticket
from headrace_staleness.multi_version import MultiVersion
from headrace_storage.memory import MemoryStorage


def tickets(flow: Flow) -> Iterator[Ticket]:
    while (ticket := flow.next_ticket()) is not None:
        yield ticket


def publish(flow: Flow) -> None:
    version = flow.view().version + 1
    flow.published(version)
    for switch in flow.switches():
        for old in switch.retire:
            flow.retired_on(switch.instance, old)
        if switch.load is not None:
            flow.committed(switch.instance, switch.load)
    for old in flow.retirable():
        flow.retired(old)


def test_H07_an_instance_that_is_done_gets_the_next_trajectory_whoever_had_the_others() -> None:
    """Two instances of one slot, 8 trajectories, every other one ten times as long: dealt in turn, instance ``a`` would
    get every long one and take 200. Without the look-ahead, whose queue hides round trips: here it would be as long as
    what is decoded."""
    policy = MultiVersion(MultiVersion.Settings(max_staleness=1))
    flow = Flow(policy=policy, batch_groups=8, group_size=1, lookahead=1.0)
    for name in "ab":
        flow.join(name, slots=1, live_versions=2, versions=(0,))
    free = {"a": 0, "b": 0}
    queue: list[tuple[int, int]] = []
    started = 0

    def start(now: int) -> None:
        nonlocal started
        for ticket in tickets(flow):
            if started == 8:
                return
            (instance,) = ticket.instances
            free[instance] = max(free[instance], now) + (5 if started % 2 else 50)
            started += 1
            heapq.heappush(queue, (free[instance], ticket.trajectories[0]))

    start(0)
    now = 0
    while queue:
        now, trajectory = heapq.heappop(queue)
        flow.generated(trajectory)
        start(now)
    assert started == 8
    assert now <= 130, "110 is ideal"


LONG = 100_000
"""Tokens of a sample."""
SAMPLE_BYTES = LONG * (4 + 1 + 4)


@pytest.mark.parametrize("outstanding", [1.0, 2.0])
def test_J02_while_the_trainer_stands_still_the_buffer_is_bounded_and_the_producer_waits(outstanding: float) -> None:
    """2000 samples of 100k tokens are on offer."""
    policy = MultiVersion(MultiVersion.Settings(max_staleness=2, outstanding_batches=outstanding))
    flow = Flow(policy=policy, batch_groups=8, group_size=4)
    flow.join("a", slots=10_000, live_versions=4, versions=(0,))
    made = 0
    while made < 2000 and (ticket := flow.next_ticket()) is not None:
        for trajectory in ticket.trajectories:
            assert flow.stored(trajectory, version=0, tokens=LONG, nbytes=SAMPLE_BYTES)
            made += 1
    assert made == outstanding * 8 * 4, "the producer is blocked"
    assert flow.nbytes == made * SAMPLE_BYTES <= 2 * 8 * 4 * SAMPLE_BYTES
    lease = flow.take_batch(now=0.0, ttl=1.0)
    assert lease is not None
    flow.trained(lease.lease)
    assert flow.nbytes == (made - len(lease.rows)) * SAMPLE_BYTES, "what is trained is forgotten"


def test_J02_two_hundred_batches_need_no_more_memory_than_fifty() -> None:
    """Rows are stored, leased, trained and freed; memory is measured after 50, 100, 150 and 200 batches."""
    flow = Flow(policy=MultiVersion(MultiVersion.Settings(max_staleness=2)), batch_groups=4, group_size=4)
    flow.join("a", slots=10_000, live_versions=4, versions=(0,))
    storage = MemoryStorage(NoSettings())
    sizes: list[int] = []
    tracemalloc.start()
    try:
        for number in range(1, 201):
            for ticket in tickets(flow):
                rows = np.array(ticket.trajectories)
                tokens = Ragged.from_arrays([np.zeros(1000, dtype=np.int32)] * len(rows))
                share = storage.put(Batch(rows=rows, columns={"tokens": tokens})) // len(rows)
                for row in ticket.trajectories:
                    flow.stored(row, version=ticket.version, tokens=1000, nbytes=share)
            assert storage.stats().nbytes == flow.nbytes <= 2 * 16 * 4000
            lease = flow.take_batch(now=0.0, ttl=1.0)
            assert lease is not None
            assert len(storage.get(lease.rows, ["tokens"])) == 16
            storage.delete(flow.trained(lease.lease))
            publish(flow)
            if number % 50 == 0:
                gc.collect()
                sizes.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert max(b - a for a, b in itertools.pairwise(sizes)) < 1 << 20
    storage.close()
