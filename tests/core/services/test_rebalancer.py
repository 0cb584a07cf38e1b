"""Moves that the flow decides, between the controller and instances that answer when the test says so."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.errors import EngineError
from headrace.flow import Move
from headrace.services.messages import PlaceCall, WorkItem
from headrace.services.node_messages import Heartbeat
from headrace.services.request_messages import Moved
from support.desk import Desk, finished, loaded, turns

MOVED = Moved(tokens=9, nbytes=72, prefilled_tokens=4)


class Moving:
    """Two instances of eight slots; ``rollout-0`` has trajectory 0, and is full of keys and values."""

    def __init__(self, desk: Desk, item: WorkItem) -> None:
        self.desk, self.item = desk, item
        self.source, self.target = desk.peers["rollout-0.0"], desk.peers["rollout-1.0"]

    @property
    def calls(self) -> list[Any]:
        return [call for method, call in self.source.asked if method == "move"]

    async def answer(self, value: Moved | Exception) -> None:
        self.source.answer("move", value)
        await turns()
        assert not self.desk.failures

    def place(self, instance: str, attempt: int = 0) -> PlaceCall:
        """What a worker says whose instance is gone."""
        return PlaceCall(
            worker="w.0",
            version=0,
            group=self.item.group,
            trajectory=0,
            instance=instance,
            attempt=attempt,
            evaluation=False,
        )


@pytest.fixture
async def moving() -> Moving:
    """The move of trajectory 0 is under way."""
    desk = await Desk(group_size=2, batch_groups=2).begin()
    item = await desk.work("w.0")
    assert item is not None
    assert [member.instance for member in item.members] == ["rollout-0.0", "rollout-1.0"]
    desk.fleet.heard(Heartbeat(node="rollout-0.0", loop_lag=0.0, kv_used=1.0))
    desk.controller.pump()
    await turns()
    assert desk.flow.moves() == (
        Move(trajectory=0, version=0, source="rollout-0", target="rollout-1", with_state=True),
    )
    return Moving(desk, item)


async def test_a_trajectory_that_moved_is_the_target_s_and_the_log_tells_it(moving: Moving) -> None:
    (call,) = moving.calls
    assert (call.trajectory, call.version, call.attempt, call.target) == (0, 0, 0, "rollout-1.0")
    await moving.answer(MOVED)
    assert moving.desk.flow.instance_of(0) == "rollout-1"
    told = {"trajectory": 0, "group": 0, "version": 0, "attempt": 0, "source": "rollout-0", "target": "rollout-1"}
    assert moving.desk.told("trajectory_moved") == [{**told, "tokens": 9, "prefilled_tokens": 4, "nbytes": 72}]
    await moving.desk.say("w.0", finished(moving.item, 0))
    assert moving.desk.told("trajectory_finished")[0]["instance"] == "rollout-1"
    tally = moving.desk.controller.tally
    assert (tally.moves, tally.failed_moves, tally.prefilled_again) == (1, 0, 4)


async def test_a_move_under_way_is_asked_for_once(moving: Moving) -> None:
    for _ in range(3):
        moving.desk.flow.rebalance()
        moving.desk.controller.pump()
        await turns()
    assert len(moving.calls) == 1


async def test_a_move_that_fails_leaves_the_trajectory_and_may_be_tried_again(moving: Moving) -> None:
    await moving.answer(EngineError("no room"))
    assert moving.desk.flow.instance_of(0) == "rollout-0"
    assert moving.desk.told("trajectory_moved") == []
    assert moving.desk.controller.tally.failed_moves == 1
    moving.desk.flow.rebalance()
    moving.desk.controller.pump()
    await turns()
    assert len(moving.calls) == 2


async def test_news_of_a_move_after_the_trajectory_has_finished_is_for_the_log_alone(moving: Moving) -> None:
    await moving.desk.say("w.0", finished(moving.item, 0))
    await moving.answer(MOVED)
    assert moving.desk.told("trajectory_finished")[0]["instance"] == "rollout-0"
    assert len(moving.desk.told("trajectory_moved")) == 1
    assert moving.desk.flow.instance_of(0) == ""


async def test_a_source_that_is_lost_ends_the_move_and_its_trajectory_is_tried_again(moving: Moving) -> None:
    _, displaced = moving.desk.fleet.lost("rollout-0")
    moving.desk.controller.instance_lost(displaced)
    await turns()
    assert not moving.desk.failures
    assert moving.desk.told("trajectory_moved") == []
    assert [e["trajectory"] for e in moving.desk.told("trajectory_failed")] == [0]
    assert (await moving.desk.controller.place(moving.place("rollout-0.0"))).instance == "rollout-1.0"


async def test_a_trajectory_that_moved_to_an_instance_that_was_lost_before_the_news_is_tried_again_where_it_was(
    moving: Moving,
) -> None:
    _, displaced = moving.desk.fleet.lost("rollout-1")
    moving.desk.controller.instance_lost(displaced)
    await moving.answer(MOVED)
    assert moving.desk.told("trajectory_moved") == []
    placement = await moving.desk.controller.place(moving.place("rollout-1.0"))
    assert (placement.instance, placement.attempt) == ("rollout-0.0", 1)
    assert [e["trajectory"] for e in moving.desk.told("trajectory_failed")] == [1, 0]
    assert moving.desk.told("trajectory_started")[-1]["instance"] == "rollout-0"


async def test_a_trajectory_that_moved_before_its_instance_left_goes_on_as_the_same_try(moving: Moving) -> None:
    moving.desk.fleet.drain("rollout-0")
    await moving.answer(MOVED)
    assert [e["instance"] for e in moving.desk.told("instance_left")] == ["rollout-0"]
    placement = await moving.desk.controller.place(moving.place("rollout-0.0"))
    assert (placement.instance, placement.attempt) == ("rollout-1.0", 0)
    assert moving.desk.told("trajectory_failed") == []
    assert len(moving.desk.told("trajectory_started")) == 2, "those of the group"


async def test_a_worker_that_comes_from_the_same_lost_place_twice_has_lost_what_was_sent_back_there(
    moving: Moving,
) -> None:
    await moving.answer(MOVED)
    _, displaced = moving.desk.fleet.lost("rollout-0")
    moving.desk.controller.instance_lost(displaced)
    places = [await moving.desk.controller.place(moving.place("rollout-0.0")) for _ in range(2)]
    assert [(place.instance, place.attempt) for place in places] == [("rollout-1.0", 0), ("rollout-1.0", 1)]


async def test_instances_hear_that_nobody_serves_where_another_was(moving: Moving) -> None:
    moving.desk.fleet.lost("rollout-1")
    await turns()
    assert [call.address for method, call in moving.source.asked if method == "instance_lost"] == ["rollout-1.0"]


async def test_an_instance_with_memory_to_spare_gets_work_again(moving: Moving) -> None:
    moving.desk.fleet.heard(Heartbeat(node="rollout-0.0", loop_lag=0.0, kv_used=0.1))
    moving.desk.fleet.heard(Heartbeat(node="trainer.0", loop_lag=0.0))
    moving.desk.fleet.heard(Heartbeat(node="rollout-7.0", loop_lag=0.0, kv_used=1.0))
    item = await moving.desk.work("w.0")
    assert item is not None
    assert "rollout-0.0" in [member.instance for member in item.members]


async def test_an_instance_that_joins_may_give_and_take_state(moving: Moving) -> None:
    peer = moving.desk.join("rollout-2")
    await turns()
    peer.answer("load_version", loaded(0))
    await moving.answer(EngineError("no room"))
    moving.desk.flow.rebalance()
    (move,) = moving.desk.flow.moves()
    assert (move.target, move.with_state) == ("rollout-2", True)
