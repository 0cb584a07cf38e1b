"""Rollout instances join and leave while the run is running: by absolute number, one change at a time, none cut."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from random import Random

import pytest

from headrace.errors import PluginError, RunError
from headrace.observe.audit import audit_run
from headrace.run.scaling import ScaleCall
from headrace.services.messages import WorkItem, WorkRequest
from headrace_staleness.multi_version import MultiVersion
from support.desk import turns
from support.lossy_world import World

Begin = Callable[..., Awaitable[World]]


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    worlds: list[World] = []

    async def begun(*, instances: int = 1) -> World:
        world = World(
            tmp_path,
            policy=MultiVersion(MultiVersion.Settings(max_staleness=2)),
            sizes=(2, 2),
            live_versions=[2] * instances,
            workers=2,
            max_attempts=3,
        )
        worlds.append(world)
        await world.begin()
        return world

    yield begun
    for world in worlds:
        world.log.close()


async def settled(world: World, *, seed: int = 0) -> None:
    """The run goes on until nobody joins or leaves."""
    random = Random(seed)
    while world.scaling.under_way:
        await world.step(random, failures=False)


def rollouts(world: World) -> list[str]:
    return sorted(name for name in world.up if name.startswith("rollout"))


async def test_a_number_is_asked_for_and_asking_again_changes_nothing(begin: Begin) -> None:
    world = await begin()
    assert await world.scale(3) is None, "who joins has no version yet"
    assert await world.scale(3) is None
    await settled(world)
    found = await world.scale(3)
    assert found is not None
    assert (found.instances, found.joining, found.leaving) == (["rollout-0", "rollout-1", "rollout-2"], [], [])
    assert rollouts(world) == found.instances


async def test_another_number_is_refused_while_instances_join_or_leave(begin: Begin) -> None:
    world = await begin()
    await world.scale(3)
    with pytest.raises(RunError, match="is being scaled to 3 rollout instances") as refused:
        await world.scale(2)
    assert refused.value.origin == "rollout-1 joins, rollout-2 joins"


@pytest.mark.parametrize("instances", [0, -1])
async def test_a_run_keeps_at_least_one_instance(begin: Begin, instances: int) -> None:
    world = await begin()
    with pytest.raises(RunError, match="cannot go on without any"):
        await world.scale(instances)


async def test_who_joins_serves_nothing_before_it_has_proved_to_have_a_version(begin: Begin) -> None:
    """G06: it is in nobody's way, and gets no work."""
    world = await begin()
    await world.scale(2)
    assert world.flow.hosting(0) == ("rollout-0",)
    while (ticket := world.flow.next_ticket()) is not None:
        assert set(ticket.instances) == {"rollout-0"}
    world._peer("rollout-1").load(live=world.live)
    await turns()
    assert world.flow.hosting(0) == ("rollout-0", "rollout-1")


async def test_the_youngest_leave_first_and_finish_what_they_have(begin: Begin, tmp_path: Path) -> None:
    world = await begin(instances=3)
    random = Random(1)
    for _ in range(60):
        await world.step(random, failures=False)
    await world.scale(1)
    await settled(world)
    assert rollouts(world) == ["rollout-0"]
    world.controller.end_phase("phase_ended")
    world.emit("run_finished", status="stopped", reason="")
    world.log.close()
    result = audit_run(tmp_path)
    assert result.ok, result.violations
    assert "drained" in result.checked
    assert result.summary["failed_attempts"] == {}


async def test_a_name_is_never_used_again(begin: Begin) -> None:
    world = await begin()
    for instances in (3, 1, 2):
        await world.scale(instances)
        await settled(world)
    assert rollouts(world) == ["rollout-0", "rollout-3"]


async def test_one_that_is_lost_as_it_drains_is_not_started_again_and_its_work_is_done_elsewhere(
    begin: Begin,
) -> None:
    world = await begin(instances=2)
    while (item := await work(world)) is not None and all("rollout-1" not in m.instance for m in item.members):
        pass
    await world.scale(1)
    assert world.scaling.under_way
    displaced = [t for t in range(world.flow.next_group * 2) if world.flow.instance_of(t) == "rollout-1"]
    assert displaced
    world.lose("rollout-1")
    await turns()
    for peer in world.peers.values():
        if getattr(peer, "is_told", False):
            peer.hear()
    await turns()
    assert not world.scaling.under_way
    assert world.starting == {}
    assert rollouts(world) == ["rollout-0"]
    assert {world.flow.place_again(trajectory) for trajectory in displaced} == {"rollout-0"}


async def work(world: World) -> WorkItem | None:
    return await world.controller.next_work(WorkRequest(worker="environment-0.0"))


async def test_one_that_is_to_leave_while_it_is_lost_does_not_join_again(begin: Begin) -> None:
    world = await begin(instances=2)
    world.lose("rollout-1")
    for _ in range(3):
        await turns()
        for peer in world.peers.values():
            if getattr(peer, "is_told", False):
                peer.hear()
    await turns()
    assert list(world.starting) == ["rollout-1"]
    await world.scale(1)
    world._comes_back("rollout-1")
    await turns()
    assert rollouts(world) == ["rollout-0"]
    assert not world.scaling.under_way
    assert len(world.fleet) == 1


async def test_one_that_cannot_be_started_is_given_up_with_the_reason_and_the_others_stay(
    begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = await begin()
    launch = world._launch

    async def fails(name: str) -> None:
        if name == "rollout-2":
            raise PluginError("no interpreter")
        await launch(name)

    monkeypatch.setattr(world.scaling, "_launch", fails)
    asking = asyncio.ensure_future(world.scaling.scale(ScaleCall(instances=3)))
    await turns()
    await settled(world)
    found = await asking
    assert (found.instances, found.given_up) == (["rollout-0", "rollout-1"], ["no interpreter"])
    assert rollouts(world) == found.instances
    again = await world.scale(2)
    assert again is not None
    assert again.given_up == [], "that was asked for now, and is there"
