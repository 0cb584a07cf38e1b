"""Scales a run by how busy its instances say they are, where its job asks for it (``[rollout.autoscale]``).

How long requests wait is not told by engines. It is the number that wait over the rate at which trajectories end
(Little's law, for a queue that is neither filling nor running dry).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

from headrace.contract import EngineHealth
from headrace.flow.autoscale import Autoscaler, Load
from headrace.run.scaling import Scaling
from headrace.services.fleet import Fleet

LOOK_SECONDS = 5.0


class Autoscaling:
    """``notice`` is told of every change."""

    def __init__(self, policy: Autoscaler, fleet: Fleet, scaling: Scaling, *, notice: Callable[[str], None]) -> None:
        self._policy = policy
        self._fleet = fleet
        self._scaling = scaling
        self._notice = notice
        self._before: tuple[float, int] | None = None
        """When it looked last, and how many trajectories had ended by then."""

    async def watch(self) -> None:
        """Until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            self.look(await self._fleet.health(), now=time.monotonic())

    def look(self, found: list[EngineHealth], *, now: float) -> None:
        """Instances have said how they are; none of them: nothing rolls out, or one did not answer."""
        load, instances = self._load(found, now), self._scaling.size
        if self._scaling.under_way:
            return
        target = self._policy.target(load, instances=instances, now=now)
        if target != instances:
            self._notice(f"scaling from {instances} to {target} rollout instances: {_text(load)}")
            self._scaling.reach(target)

    def _load(self, found: list[EngineHealth], now: float) -> Load:
        before, ended = self._before, self._fleet.ended
        self._before = None if ended is None else (now, ended)
        if not found or ended is None:
            return Load(kv_used=None, waiting=None, wait_seconds=None)
        waiting = sum(health.waiting for health in found)
        rate = 0.0 if before is None else (ended - before[1]) / (now - before[0])
        return Load(
            kv_used=sum(health.kv_used for health in found) / len(found),
            waiting=waiting,
            wait_seconds=waiting / rate if rate > 0 else None,
        )


def _text(load: Load) -> str:
    if load.kv_used is None:
        return "what the job allows"
    wait = "" if load.wait_seconds is None else f" for {load.wait_seconds:.1f} s"
    return f"{load.kv_used:.0%} of KV memory is in use, {load.waiting} requests wait{wait}"
