"""The flow on a virtual clock: instances with slots, heavy-tailed lengths, a trainer that takes its time."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from random import Random

from headrace.contract import StalenessPolicy
from headrace.flow import BatchLease, Flow, Move, Switch, Ticket

Lengths = Callable[[Random], float]

BIMODAL: Lengths = lambda random: 12.0 if random.random() < 0.1 else 0.5  # noqa: E731  distributions read best as one-liners
LOG_NORMAL: Lengths = lambda random: min(random.lognormvariate(0.0, 1.2), 25.0)  # noqa: E731


@dataclass
class Simulation:
    """``live_versions`` of an instance and the rest of the set-up; times are in units of a typical length.
    ``transfer``: from a version's publication to an instance's serving it, while the instance goes on generating.
    ``moves``: whether moves are carried out, at once and without computing anything again."""

    policy: StalenessPolicy
    lengths: Lengths
    batch_groups: int = 8
    group_size: int = 2
    instances: int = 2
    slots: int = 6
    live_versions: int = 4
    train: float = 1.0
    transfer: float = 0.0
    drop_share: float = 0.0
    moves: bool = False
    seed: int = 0
    staleness: list[int] = field(default_factory=list)
    trained: list[tuple[int, ...]] = field(default_factory=list)
    lengths_of: dict[int, float] = field(default_factory=dict)
    dispatched: list[tuple[Ticket, int]] = field(default_factory=list)
    """Every ticket, with the version that the trainer was at."""
    begun: dict[int, float] = field(default_factory=dict)
    finished: dict[int, float] = field(default_factory=dict)
    """When each trajectory was."""
    published: dict[int, float] = field(default_factory=dict)
    """When each version was."""
    most_held: int = 0
    """Groups that were stored, in flight or in training at once."""
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
        self.place_of: dict[int, str] = {}
        """Where what is decoded is, or was last."""
        for place in range(self.instances):
            name = f"i{place}"
            self.queue[name], self.running[name] = deque(), 0
            self.flow.join(name, slots=self.slots, live_versions=self.live_versions, versions=(0,), migrates=True)
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
            self.switch(switch)
        for move in self.flow.moves() if self.moves else ():
            self.move(move)
        lease = self.flow.take_batch(now=self.now, ttl=1e9)
        if lease is not None:
            self.staleness += [lease.version - self.version_of[row] for row in lease.rows]
            self.at(self.train, lambda: self.finish_batch(lease))
        while (ticket := self.flow.next_ticket()) is not None:
            self.dispatched.append((ticket, self.flow.view().version))
            for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
                self.version_of[trajectory] = ticket.version
                self.queue[instance].append(trajectory)
        for instance, queue in self.queue.items():
            while queue and self.running[instance] < self.slots:
                self.begin(instance, queue.popleft())
        view = self.flow.view()
        self.most_held = max(self.most_held, view.outstanding + view.batch_taken * self.batch_groups)
        if self.flow.may_publish():
            self.flow.published(view.version + 1)
            self.published[view.version + 1] = self.now
            for version in self.flow.retirable():
                self.flow.retired(version)
            assert len(self.flow.live_versions()) <= self.policy.max_staleness + 1
            self.pump()

    def move(self, move: Move) -> None:
        trajectory = move.trajectory
        if trajectory in self.queue[move.source]:
            self.queue[move.source].remove(trajectory)
            self.queue[move.target].append(trajectory)
        else:
            self.running[move.source] -= 1
            self.running[move.target] += 1
            self.place_of[trajectory] = move.target
        assert self.flow.moved(trajectory)

    def switch(self, switch: Switch) -> None:
        for version in switch.retire:
            self.flow.retired_on(switch.instance, version)
        if (load := switch.load) is None:
            return
        if not self.transfer:
            self.flow.committed(switch.instance, load)
            return
        self.flow.switch_begun(switch.instance)
        self.at(self.transfer, lambda: self.serve(switch.instance, load))

    def serve(self, instance: str, version: int) -> None:
        if version in self.flow.live_versions():
            self.flow.committed(instance, version)
        self.flow.switch_ended(instance)

    def begin(self, instance: str, trajectory: int) -> None:
        self.running[instance] += 1
        self.place_of[trajectory] = instance
        self.begun[trajectory] = self.now
        length = self.lengths_of[trajectory] = self.lengths(self.random)
        self.at(length, lambda: self.finish(trajectory))

    def finish(self, trajectory: int) -> None:
        self.running[self.place_of[trajectory]] -= 1
        self.finished[trajectory] = self.now
        if self.random.random() < self.drop_share:
            self.flow.drop_group(trajectory // self.group_size, "failed")
        else:
            self.flow.stored(trajectory, version=self.version_of[trajectory], tokens=1, nbytes=1)

    def finish_batch(self, lease: BatchLease) -> None:
        self.trained.append(self.flow.trained(lease.lease))
