"""The rollout instances on the virtual clock: which versions each serves, and how it gets others.

It owes the flow what :mod:`headrace.services.fleet` owes it in a real run: every switch carried out, every loss told.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import simpy

from headrace.flow import Flow, Switch
from headrace.simulate.decoding import Engine
from headrace.simulate.scenario import Scenario

Process = Generator[simpy.Event, Any, None]


@dataclass(slots=True)
class _Instance:
    engine: Engine
    lives: int = 0
    """How often it was started anew."""


class Fleet:
    """``finished``: told of each trajectory with its last token; ``lost``: when an instance fails, of its name, the
    trajectories that the flow had placed there, and of all that its engine had; ``changed``: whenever an instance
    gained a version or its place in the fleet, or its KV cache fills or empties."""

    def __init__(
        self,
        environment: simpy.Environment,
        flow: Flow,
        scenario: Scenario,
        *,
        finished: Callable[[int], None],
        lost: Callable[[str, tuple[int, ...], list[int]], None],
        changed: Callable[[], None],
    ) -> None:
        self._environment = environment
        self._flow = flow
        self._scenario = scenario
        self._costs = scenario.costs
        self._lost = lost
        self._changed = changed
        self._published = {flow.view().version: 0.0}
        self.failures = 0
        self._instances: dict[str, _Instance] = {}
        for place in range(scenario.instances):
            name = f"rollout-{place}"
            engine = Engine(
                environment,
                name,
                slots=scenario.slots,
                costs=scenario.costs,
                finished=finished,
                filled=partial(self._filled, name),
            )
            self._instances[name] = _Instance(engine)
            self._join(name, versions=tuple(self._published))
            if self._costs.seconds_between_failures is not None:
                environment.process(self._fail(name, Random(f"{scenario.seed}/{name}")))

    @property
    def engines(self) -> list[Engine]:
        """All of them."""
        return [instance.engine for instance in self._instances.values()]

    def engine(self, name: str) -> Engine:
        """The one of an instance."""
        return self._instances[name].engine

    def published(self, version: int) -> None:
        """Weights start to travel."""
        self._published[version] = self._environment.now

    def retired(self, version: int) -> None:
        """Nobody will load it any more."""
        del self._published[version]

    def sync(self) -> None:
        """Carry out what the flow wants now."""
        for switch in self._flow.switches():
            self._flow.switch_begun(switch.instance)
            self._environment.process(self._switch(self._instances[switch.instance], switch))

    def _filled(self, name: str, share: float) -> None:
        self._flow.kv_used(name, share)
        self._changed()

    def _join(self, name: str, versions: tuple[int, ...]) -> None:
        at = self._scenario
        self._flow.join(name, slots=at.slots, live_versions=at.live_versions, versions=versions, migrates=at.migrates)

    def _switch(self, instance: _Instance, switch: Switch) -> Process:
        """Weights travel from their publication on, while the instance decodes; it stops only to take them up."""
        lives = instance.lives
        for version in switch.retire:
            self._flow.retired_on(switch.instance, version)
        if switch.load is not None:
            there = self._published[switch.load] + self._costs.transfer_seconds
            yield self._environment.timeout(max(0.0, there - self._environment.now))
            if instance.lives == lives and self._costs.switch_seconds:
                instance.engine.pause(self._costs.switch_seconds)
                yield self._environment.timeout(self._costs.switch_seconds)
        if instance.lives != lives:
            return  # it failed meanwhile, and has begun anew
        if switch.load in self._published:  # else it was retired while it travelled
            self._flow.committed(switch.instance, switch.load)
            if self._flow.interruption is not None and not self._flow.interruption.keep_kv:
                instance.engine.prefill_again()
        self._flow.switch_ended(switch.instance)
        self._changed()

    def _fail(self, name: str, random: Random) -> Process:
        mean, instance = self._costs.seconds_between_failures, self._instances[name]
        assert mean is not None, "asked before"
        while True:
            yield self._environment.timeout(random.expovariate(1 / mean))
            self.failures += 1
            instance.lives += 1
            self._lost(name, self._flow.leave(name), instance.engine.stop())
            yield self._environment.timeout(self._costs.restart_seconds)
            self._join(name, versions=())
            self._changed()
