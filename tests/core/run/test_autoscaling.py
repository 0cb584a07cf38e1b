"""What instances say of themselves, as the load that decides how many there should be."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.contract import EngineHealth
from headrace.errors import DeadlineError
from headrace.flow.autoscale import Autoscaler, Load
from headrace.run.autoscaling import Autoscaling
from support.desk import Desk, turns


def health(*, kv_used: float = 0.5, waiting: int = 0) -> EngineHealth:
    return EngineHealth(versions=(0,), running=1, waiting=waiting, kv_used=kv_used, generated_tokens=0)


class Around:
    """The fleet, the scaling and the policy that it speaks with; each notes what it hears."""

    def __init__(self, *, size: int = 2) -> None:
        self.size, self.under_way, self.ended = size, False, 0
        self.loads: list[Load] = []
        self.reached: list[int] = []
        self.notices: list[str] = []
        self.wanted = size
        around: Any = self
        self.autoscaling = Autoscaling(around, around, around, notice=self.notices.append)

    def target(self, load: Load, *, instances: int, now: float) -> int:
        self.loads.append(load)
        return self.wanted

    def reach(self, target: int) -> None:
        self.reached.append(target)


def test_memory_is_the_mean_and_the_queue_is_the_sum() -> None:
    around = Around()
    around.autoscaling.look([health(kv_used=0.2, waiting=3), health(kv_used=0.6, waiting=5)], now=0.0)
    assert around.loads == [Load(kv_used=pytest.approx(0.4), waiting=8, wait_seconds=None)]


def test_the_wait_is_the_queue_over_the_rate_at_which_trajectories_end() -> None:
    around = Around()
    around.autoscaling.look([health()], now=10.0)
    around.ended = 20
    around.autoscaling.look([health(waiting=8)], now=15.0)
    assert around.loads[-1].wait_seconds == 8 / (20 / 5.0)
    around.autoscaling.look([health(waiting=8)], now=20.0)
    assert around.loads[-1].wait_seconds is None, "nothing ended: nobody knows"


@pytest.mark.parametrize("nothing", ["no answer", "no rollout"])
def test_what_nobody_said_is_not_known(nothing: str) -> None:
    around: Any = Around()
    if nothing == "no rollout":
        around.ended = None
    around.autoscaling.look([] if nothing == "no answer" else [health()], now=0.0)
    assert around.loads == [Load(kv_used=None, waiting=None, wait_seconds=None)]


def test_a_change_is_told_and_begun() -> None:
    around = Around()
    around.wanted = 3
    around.autoscaling.look([health(kv_used=0.9, waiting=4)], now=0.0)
    assert around.reached == [3]
    assert around.notices == ["scaling from 2 to 3 rollout instances: 90% of KV memory is in use, 4 requests wait"]


def test_nothing_is_decided_while_a_change_is_under_way() -> None:
    around = Around()
    around.wanted, around.under_way = 3, True
    around.autoscaling.look([health()], now=0.0)
    assert around.reached == around.loads == around.notices == []


async def test_instances_that_are_to_stay_say_how_they_are_and_one_that_is_silent_leaves_it_unknown() -> None:
    desk = await Desk(instances=3).begin()
    desk.fleet.drain("rollout-2")
    for answers, expected in (([health(), health()], 2), ([health(), DeadlineError("silent")], 0)):
        looking = asyncio.ensure_future(desk.fleet.health())
        await turns()
        for number, answer in enumerate(answers):
            desk.peers[f"rollout-{number}.0"].answer("health", answer)
        assert len(await looking) == expected


def test_bounds_reach_a_run_that_begins_outside_of_them() -> None:
    around: Any = Around(size=1)
    autoscaling = Autoscaling(Autoscaler(least=2, most=4), around, around, notice=around.notices.append)
    autoscaling.look([], now=0.0)
    assert around.reached == [2]
    assert around.notices == ["scaling from 1 to 2 rollout instances: what the job allows"]
