"""The training loop on a virtual clock: the run's own flow and policy, with models in the place of engines.

It tells the flow what happens and asks it what may, in the order of :mod:`headrace.run.loop` and the controller's pump;
no decision is made here. Trainer, switches and failures are SimPy processes, engines are event-driven models
(:mod:`headrace.simulate.decoding`), so that a trajectory costs a few events however long it is.

Invariant: the same scenario and policy give the same outcome, to the bit.
"""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import simpy
from simpy.core import EmptySchedule

from headrace.errors import StalenessError
from headrace.flow import BatchLease, Flow, Ticket
from headrace.services.attempts import Attempts
from headrace.services.fleet import REBALANCE_SECONDS
from headrace.simulate.decoding import Request
from headrace.simulate.evaluation import Evaluation
from headrace.simulate.fleet import Fleet
from headrace.simulate.measures import BatchRecord, Outcome, outcome
from headrace.simulate.moving import Moving
from headrace.simulate.scenario import Candidate, Scenario

INSTANCE_LOST = "instance_lost"
_NEVER = float("inf")


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A trajectory on an instance, or the trainer at work (``instance = ""``), for a Gantt chart."""

    instance: str
    version: int
    start: float
    stop: float


@contextmanager
def _without_collecting_cycles() -> Iterator[None]:
    """Hardly any come about, and looking for them takes a quarter of the time where instances are many."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class Simulation:
    """``spans``: told of what every instance and the trainer did, in the order in which it ended."""

    def __init__(
        self, scenario: Scenario, candidate: Candidate, *, spans: Callable[[Span], None] | None = None
    ) -> None:
        self.scenario = scenario
        self.flow = Flow(
            policy=candidate.policy,
            batch_groups=scenario.batch_groups,
            group_size=scenario.group_size,
            prompt=scenario.trajectories.prompt if scenario.order == "longest_first" else None,
        )
        self.records: list[BatchRecord] = []
        self._candidate = candidate
        self._costs = scenario.costs
        self._spans = spans
        self._environment = simpy.Environment()
        self._fleet = Fleet(
            self._environment,
            self.flow,
            scenario,
            finished=self._generated,
            lost=self._displaced,
            changed=self._stir,
        )
        self._moving = Moving(self._environment, self.flow, self._fleet, scenario.costs, arrived=self._moved)
        self._rebalance = 0.0
        """When the flow is to look for moves again."""
        self._attempts = Attempts(scenario.max_attempts)
        self._stirred = False
        self._batch: simpy.Event | None = None
        self._leave: simpy.Event | None = None
        self._versions: dict[int, int] = {}
        """Group → version, until it is trained or dropped."""
        self._missing: dict[int, int] = {}
        """Group → members without their last token."""
        self._started: dict[int, float] = {}
        """Trajectory → when its present try was sent to an instance."""
        self._came: dict[int, float] = {}
        """Trajectory → when it came to the instance it is on, or was sent there."""
        self._longest: dict[int, float] = {}
        """Version → seconds of its longest trajectory."""
        self._evaluation = Evaluation(self.flow, self._fleet, scenario)

    def run(self) -> Outcome:
        """Train every batch. StalenessError when nothing can happen any more, or what the flow raises."""
        environment, scenario, costs = self._environment, self.scenario, self._costs
        self._stir()
        trainer = environment.process(self._train())
        try:
            with _without_collecting_cycles():
                while trainer.is_alive:
                    environment.step()
        except EmptySchedule:
            raise StalenessError(
                f"nothing can happen any more, after {len(self.records)} batches: {self.flow.view()}",
                origin=f"staleness policy {self._candidate.name}",
                fix="this is a fault of the policy: it waits for what it holds back",
            ) from None
        return outcome(
            self.records,
            policy=self._candidate.name,
            max_staleness=self._candidate.policy.max_staleness,
            warm_up=scenario.warm_up,
            slots=scenario.slots * scenario.instances,
            full_rate=scenario.full_rate,
            longest=self._longest,
            publish_seconds=costs.publish_seconds,
            counts=self.flow.counts(),
            failures=self._fleet.failures,
            moves=self._moving.done,
            prefilled_again=self._moving.prefilled_again
            + sum(engine.prefilled_again for engine in self._fleet.engines),
        )

    # ------------------------------------------------------------ the trainer

    def _train(self) -> Generator[simpy.Event, Any, None]:
        environment, flow, costs = self._environment, self.flow, self._costs
        for step in range(self.scenario.batches):
            lease, awaited, trained = yield from self._trained_batch()
            staleness = Counter(
                lease.version - version
                for version in map(self._versions.pop, lease.groups)
                for _ in range(flow.group_size)
            )
            flow.trained(lease.lease)
            blocked = environment.now
            leave = self._leave = environment.event()
            self._pump()
            yield leave
            blocked = environment.now - blocked
            yield environment.timeout(costs.publish_seconds)
            version = lease.version + 1
            flow.published(version)
            self._fleet.published(version)
            self.records.append(
                BatchRecord(
                    version=lease.version,
                    awaited=awaited,
                    trained=trained,
                    blocked=blocked,
                    published=environment.now,
                    response_tokens=sum(lease.tokens) - costs.prompt_tokens * len(lease.tokens),
                    staleness=staleness,
                    busy_seconds=self._busy_seconds(),
                )
            )
            self._evaluation.after_batch(step, version)
            self._pump()
            for retired in flow.retirable():
                flow.retired(retired)
                self._fleet.retired(retired)

    def _trained_batch(self) -> Generator[simpy.Event, Any, tuple[BatchLease, float, float]]:
        """The next batch, the seconds waited for it and those of its training, in parts where the job streams."""
        environment, costs = self._environment, self._costs
        awaited = trained = 0.0
        read: set[int] = set()
        while True:
            began = environment.now
            batch = self._batch = environment.event()
            self._pump()
            lease, last = yield batch
            awaited += environment.now - began
            began = environment.now
            size = self.flow.group_size
            tokens = sum(count for row, count in zip(lease.rows, lease.tokens, strict=True) if row // size not in read)
            yield environment.timeout(costs.train_seconds_per_token * tokens + (costs.train_seconds if last else 0.0))
            trained += environment.now - began
            self._tell("", lease.version, began)
            if last:
                return lease, awaited, trained
            read.update(lease.groups)

    def _busy_seconds(self) -> float:
        for engine in self._fleet.engines:
            engine.advance()
        return sum(engine.busy_seconds for engine in self._fleet.engines)

    # ------------------------------------------------------------ the pump

    def _stir(self) -> None:
        """Something changed: pump once, when all that happens at this moment has happened."""
        if not self._stirred:
            self._stirred = True
            self._at(0.0, self._pump)

    def _at(self, delay: float, action: Callable[[], None]) -> None:
        timeout = self._environment.timeout(delay)
        assert timeout.callbacks is not None, "it has just been made"
        timeout.callbacks.append(lambda _: action())

    def _pump(self) -> None:
        """Give out whatever has become possible, as the controller does."""
        flow = self.flow
        self._stirred = False
        if self._environment.now >= self._rebalance:
            self._rebalance = self._environment.now + REBALANCE_SECONDS
            flow.rebalance()
        self._fleet.sync()
        self._evaluation.go_on()
        for trajectory in flow.unplaced():
            if instance := flow.place_again(trajectory):
                self._submit(trajectory, instance)
        if self._batch is not None and (taken := self._take()) is not None:
            self._batch.succeed(taken)
            self._batch = None
        if self._leave is not None and flow.may_publish():
            self._leave.succeed()
            self._leave = None
        while (ticket := flow.next_ticket()) is not None:
            self._start(ticket)
        self._moving.begin()

    def _take(self) -> tuple[BatchLease, bool] | None:
        lease = self.flow.take_batch(now=0.0, ttl=_NEVER)
        if lease is not None:
            return lease, True
        part = self.flow.take_part(now=0.0, ttl=_NEVER) if self.scenario.streaming else None
        return None if part is None else (part, False)

    # ------------------------------------------------------------ trajectories

    def _start(self, ticket: Ticket) -> None:
        self._versions[ticket.group] = ticket.version
        self._missing[ticket.group] = len(ticket.trajectories)
        for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
            if instance:
                self._submit(trajectory, instance)

    def _submit(self, trajectory: int, instance: str) -> None:
        self._started[trajectory] = self._came[trajectory] = self._environment.now
        if self._costs.request_seconds:
            self._at(self._costs.request_seconds, lambda: self._arrive(trajectory, instance))
        else:
            self._arrive(trajectory, instance)

    def _arrive(self, trajectory: int, instance: str) -> None:
        if self.flow.instance_of(trajectory) == instance:  # else the instance failed meanwhile
            tokens = self.scenario.trajectories.tokens(trajectory)
            self._fleet.engine(instance).submit(Request(trajectory, self._costs.prompt_tokens, tokens))

    def _moved(self, trajectory: int, source: str) -> None:
        """A trajectory goes on elsewhere, under its version."""
        self._tell(source, self._versions[trajectory // self.flow.group_size], self._came[trajectory])
        self._came[trajectory] = self._environment.now
        self._stir()

    def _generated(self, trajectory: int) -> None:
        flow, group = self.flow, trajectory // self.flow.group_size
        self._stir()
        if trajectory < 0:
            self._evaluation.answered(trajectory)
            return
        if group not in self._missing:  # it was dropped
            return
        instance, started = flow.instance_of(trajectory), self._started.pop(trajectory)
        flow.generated(trajectory)
        version = self._versions[group]
        self._longest[version] = max(self._longest.get(version, 0.0), self._environment.now - started)
        self._tell(instance, version, self._came.pop(trajectory))
        self._missing[group] -= 1
        if self._missing[group] == 0:
            if self._costs.scoring_seconds:
                self._at(self._costs.scoring_seconds, lambda: self._stored(group))
            else:
                self._stored(group)

    def _stored(self, group: int) -> None:
        """A worker puts the rows of its group together, when all are scored."""
        flow, version = self.flow, self._versions[group]
        del self._missing[group]
        for trajectory in range(group * flow.group_size, (group + 1) * flow.group_size):
            tokens = self._costs.prompt_tokens + self.scenario.trajectories.tokens(trajectory)
            flow.stored(trajectory, version=version, tokens=tokens, nbytes=0)
            self._attempts.forget((trajectory,))
        self._stir()

    def _displaced(self, instance: str, trajectories: tuple[int, ...], requests: list[int]) -> None:
        """An instance failed: its trajectories start anew, unless they were tried too often."""
        self._moving.lost(instance)
        self._evaluation.lost(requests)
        size = self.flow.group_size
        for group in sorted({t // size for t in trajectories if not self._attempts.failed(t)}):
            self.flow.drop_group(group, INSTANCE_LOST)
            del self._missing[group], self._versions[group]
            self._attempts.forget(range(group * size, (group + 1) * size))
        self._stir()

    def _tell(self, instance: str, version: int, start: float) -> None:
        if self._spans is not None:
            self._spans(Span(instance=instance, version=version, start=start, stop=self._environment.now))
