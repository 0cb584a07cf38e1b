"""Instances, workers and the storage unit are lost at any moment, again and again, and instances join and leave, with
messages on their way: nothing is lost or trained twice, no instance is asked for what it does not serve, none that
leaves is cut short, and the run gets further."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import tempfile
from pathlib import Path
from random import Random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from headrace.contract import StalenessPolicy
from headrace.errors import RunError
from headrace.observe.audit import audit_run
from support.flow_model import POLICIES
from support.lossy_world import World

SEEDS = st.integers(0, 2**32)
PATIENCE = 3000
"""Steps that the driver may take for one more batch, with every node up."""


class Losses(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.directory = Path(tempfile.mkdtemp())
        self.world: World | None = None

    @initialize(
        policy=st.sampled_from(POLICIES),
        sizes=st.tuples(st.integers(1, 2), st.integers(1, 2)),
        live_versions=st.lists(st.integers(1, 3), min_size=1, max_size=3),
        workers=st.integers(1, 2),
        max_attempts=st.integers(1, 4),
    )
    def begin(
        self,
        policy: StalenessPolicy,
        sizes: tuple[int, int],
        live_versions: list[int],
        workers: int,
        max_attempts: int,
    ) -> None:
        async def start() -> World:
            world = World(
                self.directory,
                policy=policy,
                sizes=sizes,
                live_versions=live_versions,
                workers=workers,
                max_attempts=max_attempts,
            )
            await world.begin()
            return world

        self.world = self.runner.run(start())

    @rule(seed=SEEDS, count=st.integers(1, 40), failures=st.booleans())
    def a_while(self, seed: int, count: int, failures: bool) -> None:
        self.runner.run(self._steps(Random(seed), count, failures=failures))

    async def _steps(self, random: Random, count: int, *, failures: bool) -> None:
        assert self.world is not None
        for _ in range(count):
            await self.world.step(random, failures=failures and random.random() < 0.1)

    @rule(seed=SEEDS, kind=st.sampled_from(["rollout", "environment", "storage"]))
    def lose(self, seed: int, kind: str) -> None:
        assert self.world is not None
        names = sorted(name for name in self.world.up if name.startswith(kind))
        if names:
            self.runner.run(self._lose(Random(seed).choice(names)))

    @rule(instances=st.integers(1, 4))
    def scale(self, instances: int) -> None:
        assert self.world is not None
        with contextlib.suppress(RunError):  # one change is made at a time
            self.runner.run(self.world.scale(instances))

    @rule()
    def lose_everything(self) -> None:
        assert self.world is not None
        for name in sorted(self.world.up):
            if name in self.world.up:  # one that drained may leave meanwhile
                self.runner.run(self._lose(name))

    async def _lose(self, name: str) -> None:
        assert self.world is not None
        self.world.lose(name)
        await asyncio.sleep(0)
        self.world.check()

    # ------------------------------------------------------------ the end

    async def _goes_on(self, world: World) -> None:
        """Two more batches: one may be of rows that were there. Who joins or leaves has done so in the end."""
        random, wanted = Random(0), world.batches + 2
        for _ in range(PATIENCE):
            if world.batches >= wanted and not world.scaling.under_way:
                return
            await world.step(random, failures=False)
        raise AssertionError(
            f"no two more batches in {PATIENCE} steps, or still scaling ({world.scaling.under_way}): "
            f"{world.flow.view()}, {world.flow.counts()}"
        )

    async def _end(self, world: World) -> None:
        while world.is_training:
            await world.step(Random(0), failures=False)
        world.controller.end_phase("phase_ended")
        world.emit("run_finished", status="stopped", reason="")
        world.log.close()

    def teardown(self) -> None:
        try:
            if self.world is not None:
                self.runner.run(self._goes_on(self.world))
                self.runner.run(self._end(self.world))
                result = audit_run(self.directory)
                assert result.ok, result.verdict
        finally:
            self.runner.close()
            shutil.rmtree(self.directory)


class TestLosses(Losses.TestCase):  # type: ignore[name-defined,misc]
    settings = settings(max_examples=40, stateful_step_count=15, deadline=None, suppress_health_check=list(HealthCheck))
