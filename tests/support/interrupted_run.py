"""The log of a run whose trajectories are interrupted: the controller's own, among instances and workers that do what a
seed says."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from random import Random
from typing import Any

from headrace_staleness.partial_rollout import PartialRollout
from support.lossy_world import World

BATCHES = 12
BOUND = 3


def interrupted_run(directory: Path, *, seed: int = 0) -> list[dict[str, Any]]:
    """Its events. Nothing is lost in it."""

    async def run() -> None:
        world = World(
            directory,
            policy=PartialRollout(PartialRollout.Settings(max_staleness=BOUND)),
            sizes=(2, 2),
            live_versions=[1, 2],
            workers=2,
            max_attempts=3,
        )
        await world.begin()
        random = Random(seed)
        while world.batches < BATCHES or world.is_training:
            await world.step(random, failures=False)
        world.controller.end_phase("phase_ended")
        world.emit("run_finished", status="completed", reason="")
        world.log.close()

    asyncio.run(run())
    return [json.loads(line) for line in (directory / "events.jsonl").read_text().splitlines()]
