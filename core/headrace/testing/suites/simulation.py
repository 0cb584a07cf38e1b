"""The real flow on a virtual clock, for the suite of staleness policies: lengths with long tails, lost groups, batches
that are given back. Deterministic: the same arguments give the same run."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random
from typing import TypeAlias

from headrace.contract import StalenessPolicy
from headrace.flow import BatchLease, Flow

Lengths: TypeAlias = Callable[[Random], float]
GROUP_SIZE = 2
TRAIN = 1.0
"""How long a batch takes to train; a typical trajectory takes 1 too."""


def even(random: Random) -> float:
    """Every trajectory takes 1."""
    return 1.0


def long_tailed(random: Random) -> float:
    """One trajectory in ten takes as long as twenty others."""
    return 12.0 if random.random() < 0.1 else 0.6


@dataclass(slots=True)
class Outcome:
    """What a simulated run came to."""

    batches: int = 0
    staleness: list[int] = field(default_factory=list)
    """Of every trained row."""
    stuck: str = ""
    """Where it came to a halt with nothing left to happen; empty when it did not."""


class Simulation:
    """One phase of a run. ``lost``: share of groups that fail; ``released``: every so many batches one is given back
    and taken again; 0: none."""

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        lengths: Lengths,
        batch_groups: int = 4,
        slots: int = 6,
        instances: int = 2,
        lost: float = 0.0,
        released: int = 0,
    ) -> None:
        self._lengths = lengths
        self._slots = slots
        self._lost = lost
        self._released = released
        self._random = Random(7)
        self._flow = Flow(policy=policy, batch_groups=batch_groups, group_size=GROUP_SIZE)
        self._queues: dict[str, deque[int]] = {f"instance-{n}": deque() for n in range(instances)}
        self._running = dict.fromkeys(self._queues, 0)
        self._versions: dict[int, int] = {}
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._now, self._sequence, self._leases = 0.0, 0, 0
        self._outcome = Outcome()
        for name in self._queues:
            self._flow.join(name, slots=slots, live_versions=4, versions=(0,))

    def run(self, *, batches: int) -> Outcome:
        """Until ``batches`` are trained, or nothing happens any more. StalenessError when the flow refuses what the
        policy allowed."""
        while self._outcome.batches < batches:
            self._settle()
            if not self._events:
                self._outcome.stuck = f"batch {self._outcome.batches}, {self._flow.view()}"
                break
            self._now, _, event = heapq.heappop(self._events)
            event()
        return self._outcome

    def _after(self, delay: float, event: Callable[[], None]) -> None:
        self._sequence += 1
        heapq.heappush(self._events, (self._now + delay, self._sequence, event))

    def _settle(self) -> None:
        """All that can happen now, as the run's loop would have it."""
        self._switch()
        while (ticket := self._flow.next_ticket()) is not None:
            for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
                self._queues[instance].append(trajectory)
        for instance, queue in self._queues.items():
            while queue and self._running[instance] < self._slots:
                self._begin(instance, queue.popleft())
        lease = self._flow.take_batch(now=self._now, ttl=1e9)
        if lease is not None:
            self._leases += 1
            given_back = self._released and self._leases % self._released == 0
            self._after(TRAIN, (lambda: self._give_back(lease)) if given_back else (lambda: self._train(lease)))
        if self._flow.may_publish():
            self._flow.published(self._flow.view().version + 1)
            for version in self._flow.retirable():
                self._flow.retired(version)
            self._settle()

    def _switch(self) -> None:
        for switch in self._flow.switches():
            for version in switch.retire:
                self._flow.retired_on(switch.instance, version)
            if switch.load is not None:
                self._flow.committed(switch.instance, switch.load)

    def _begin(self, instance: str, trajectory: int) -> None:
        self._running[instance] += 1
        if self._flow.knows(trajectory // GROUP_SIZE):
            self._versions[trajectory] = self._flow.version_of(trajectory)
        self._after(self._lengths(self._random), lambda: self._finish(instance, trajectory))

    def _finish(self, instance: str, trajectory: int) -> None:
        self._running[instance] -= 1
        if self._random.random() < self._lost:
            self._flow.drop_group(trajectory // GROUP_SIZE, "failed")
        else:
            self._flow.stored(trajectory, version=self._versions[trajectory], tokens=1, nbytes=1)

    def _give_back(self, lease: BatchLease) -> None:
        self._flow.release(lease.lease)

    def _train(self, lease: BatchLease) -> None:
        self._outcome.staleness += [lease.version - self._versions[row] for row in lease.rows]
        self._flow.trained(lease.lease)
        self._outcome.batches += 1
