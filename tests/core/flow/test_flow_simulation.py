"""The flow on a virtual clock: instances with slots, heavy-tailed lengths, a trainer that takes its time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

import pytest

from headrace.contract import StalenessPolicy
from headrace.flow import BatchLease, Flow
from headrace_staleness.multi_version import MultiVersion

Lengths = Callable[[Random], float]

BIMODAL: Lengths = lambda random: 12.0 if random.random() < 0.1 else 0.5  # noqa: E731  distributions read best as one-liners
LOG_NORMAL: Lengths = lambda random: min(random.lognormvariate(0.0, 1.2), 25.0)  # noqa: E731


@dataclass
class Simulation:
    """``live_versions`` of an instance and the rest of the set-up; times are in units of a typical length."""

    policy: StalenessPolicy
    lengths: Lengths
    batch_groups: int = 8
    group_size: int = 2
    instances: int = 2
    slots: int = 6
    live_versions: int = 4
    train: float = 1.0
    drop_share: float = 0.0
    seed: int = 0
    staleness: list[int] = field(default_factory=list)
    trained: list[tuple[int, ...]] = field(default_factory=list)
    lengths_of: dict[int, float] = field(default_factory=dict)
    now: float = 0.0

    def run(self, batches: int) -> float:
        """The time it takes; StalenessError or AssertionError when something breaks."""
        self.random = Random(self.seed)
        self.flow = Flow(policy=self.policy, batch_groups=self.batch_groups, group_size=self.group_size)
        self.queue: dict[str, deque[int]] = {}
        self.running: dict[str, int] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.sequence = 0
        self.version_of: dict[int, int] = {}
        for place in range(self.instances):
            name = f"i{place}"
            self.queue[name], self.running[name] = deque(), 0
            self.flow.join(name, slots=self.slots, live_versions=self.live_versions, versions=(0,))
        while len(self.trained) < batches:
            self.pump()
            assert self.events, f"nothing happens any more: {self.flow.view()}"
            self.now, _, event = heapq.heappop(self.events)
            event()
        return self.now

    def at(self, delay: float, event: Callable[[], None]) -> None:
        self.sequence += 1
        heapq.heappush(self.events, (self.now + delay, self.sequence, event))

    def pump(self) -> None:
        for switch in self.flow.switches():
            for version in switch.retire:
                self.flow.retired_on(switch.instance, version)
            if switch.load is not None:
                self.flow.committed(switch.instance, switch.load)
        while (ticket := self.flow.next_ticket()) is not None:
            for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
                self.version_of[trajectory] = ticket.version
                self.queue[instance].append(trajectory)
        for instance, queue in self.queue.items():
            while queue and self.running[instance] < self.slots:
                self.begin(instance, queue.popleft())
        lease = self.flow.take_batch(now=self.now, ttl=1e9)
        if lease is not None:
            self.staleness += [lease.version - self.version_of[row] for row in lease.rows]
            self.at(self.train, lambda: self.finish_batch(lease))
        if self.flow.may_publish():
            self.flow.published(self.flow.view().version + 1)
            for version in self.flow.retirable():
                self.flow.retired(version)
            assert len(self.flow.live_versions()) <= self.policy.max_staleness + 1
            self.pump()

    def begin(self, instance: str, trajectory: int) -> None:
        self.running[instance] += 1
        length = self.lengths_of[trajectory] = self.lengths(self.random)
        self.at(length, lambda: self.finish(instance, trajectory))

    def finish(self, instance: str, trajectory: int) -> None:
        self.running[instance] -= 1
        if self.random.random() < self.drop_share:
            self.flow.drop_group(trajectory // self.group_size, "failed")
        else:
            self.flow.stored(trajectory, version=self.version_of[trajectory], tokens=1, nbytes=1)

    def finish_batch(self, lease: BatchLease) -> None:
        self.trained.append(self.flow.trained(lease.lease))


def multi_version(max_staleness: int, outstanding_batches: float | None = None) -> MultiVersion:
    return MultiVersion(MultiVersion.Settings(max_staleness=max_staleness, outstanding_batches=outstanding_batches))


@pytest.mark.parametrize("lengths", [BIMODAL, LOG_NORMAL], ids=["bimodal", "log-normal"])
@pytest.mark.parametrize(
    ("max_staleness", "outstanding_batches"), [(0, None), (1, None), (2, 1.3), (2, None), (3, 3), (5, 4.5)]
)
@pytest.mark.parametrize("live_versions", [1, 3])
def test_the_bound_holds_and_the_run_goes_on_for_any_lengths(
    max_staleness: int, outstanding_batches: float | None, lengths: Lengths, live_versions: int
) -> None:
    simulation = Simulation(
        policy=multi_version(max_staleness, outstanding_batches),
        lengths=lengths,
        live_versions=live_versions,
        drop_share=0.02,
    )
    simulation.run(batches=15)
    assert min(simulation.staleness) >= 0
    assert max(simulation.staleness) <= max_staleness
    rows = [row for batch in simulation.trained for row in batch]
    assert len(rows) == len(set(rows)) == 15 * 16


def test_a_wider_window_hides_longer_tails() -> None:
    times = [Simulation(policy=multi_version(bound), lengths=BIMODAL, seed=3).run(batches=25) for bound in (0, 1, 2, 3)]
    assert times == sorted(times, reverse=True)
    assert times[3] < 0.5 * times[0]


def test_what_is_trained_is_as_long_as_what_is_generated() -> None:
    simulation = Simulation(policy=multi_version(2), lengths=BIMODAL, seed=1)
    simulation.run(batches=80)
    long = [simulation.lengths_of[row] > 1.0 for batch in simulation.trained for row in batch]
    assert sum(long) / len(long) == pytest.approx(0.1, abs=0.02)
