"""Instances join and leave, with messages on their way and none lost: the same worlds in every run of the tests."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from random import Random

from headrace.errors import RunError
from headrace.observe.events import TrajectoryFailed, TrajectoryMoved, read_events
from support.flow_model import POLICIES
from support.lossy_world import World

WORLDS = 100


async def scaled_again_and_again(directory: Path, random: Random) -> None:
    world = World(
        directory,
        policy=random.choice(POLICIES),
        sizes=(random.randint(1, 2), random.randint(1, 2)),
        live_versions=[random.randint(1, 3) for _ in range(3)],
        workers=random.randint(1, 2),
        max_attempts=3,
    )
    await world.begin()
    for _ in range(6):
        for _ in range(random.randint(1, 30)):
            await world.step(random, failures=False)
        with contextlib.suppress(RunError):  # one change is made at a time
            await world.scale(random.randint(1, 4))
    for _ in range(100):
        await world.step(random, failures=False)
    world.log.close()


def test_no_trajectory_is_tried_again_because_instances_left(tmp_path: Path) -> None:
    moved = 0
    for number in range(WORLDS):
        directory = tmp_path / str(number)
        directory.mkdir()
        asyncio.run(scaled_again_and_again(directory, Random(number)))
        events = list(read_events(directory))
        assert not [event for event in events if isinstance(event, TrajectoryFailed)], f"world {number}"
        moved += sum(isinstance(event, TrajectoryMoved) for event in events)
    assert moved, "some had to move to let an instance go"
