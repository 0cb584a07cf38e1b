"""The rollout instances when one is lost: while it loads, while it is checked, while nothing rolls out."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from headrace.errors import EngineError, WireError
from headrace.services.messages import VersionLoaded
from headrace_staleness.multi_version import MultiVersion
from support.desk import Desk, Peer, loaded, published, turns


def publish(desk: Desk, version: int) -> None:
    """The batch of the version before is trained, and this one is out."""
    desk.fleet.published(published(version))
    desk.flow._batch_trained = True
    desk.flow.published(version)
    desk.controller.pump()


async def lose(desk: Desk, name: str) -> None:
    desk.fleet.lost(name)
    await turns()


async def test_an_instance_gets_nothing_from_the_moment_it_is_lost() -> None:
    desk = await Desk().begin()
    desk.fleet.lost("rollout-0")
    item = await desk.work("w.0")
    assert item is not None
    assert {m.instance for m in item.members} == {"rollout-1.0"}


async def test_an_instance_that_is_lost_while_it_loads_harms_nobody_and_loads_when_it_is_back() -> None:
    desk = await Desk().begin()
    publish(desk, 1)
    await turns()
    assert desk.peers["rollout-0.0"].waits("load_version")
    await lose(desk, "rollout-0")
    peer = desk.join("rollout-0", start=1)
    await turns()
    peer.answer("load_version", loaded(1))
    await turns()
    assert desk.failures == []
    assert desk.flow.hosting(1) == ("rollout-0",)


async def test_an_answer_of_a_lost_instance_says_nothing_of_its_successor() -> None:
    desk = await Desk(instances=1).begin()
    publish(desk, 1)
    await turns()
    desk.peers["rollout-0.0"].answer("load_version", loaded(1))
    desk.fleet.lost("rollout-0")
    desk.join("rollout-0", start=1)
    await turns()
    assert desk.flow.hosting(1) == ()
    assert desk.failures == []


async def test_a_version_that_is_being_retired_takes_no_trajectory_back() -> None:
    desk = await Desk(policy=MultiVersion(MultiVersion.Settings(max_staleness=3))).begin()
    item = await desk.work("w.0")
    assert item is not None
    slow, quick = item.members
    desk.flow.generated(quick.trajectory)
    publish(desk, 1)
    await turns()
    for peer in desk.peers.values():
        peer.answer("load_version", loaded(1))
    await turns()
    assert await desk.work("w.0") is not None
    desk.at_once.clear()
    publish(desk, 2)
    await turns()
    other = next(peer for name, peer in desk.peers.items() if name != slow.instance)
    assert other.waits("retire_version")
    assert other.asked[-1][1].version == 0
    desk.fleet.lost(slow.instance.partition(".")[0])
    assert desk.flow.place_again(slow.trajectory) is None


async def test_a_load_that_fails_of_itself_is_an_error() -> None:
    desk = await Desk().begin()
    publish(desk, 1)
    await turns()
    desk.peers["rollout-0.0"].answer("load_version", WireError("no such version"))
    await turns()
    assert [str(error) for error in desk.failures] == ["no such version"]


async def test_what_a_lost_instance_said_of_its_engine_ends_nothing() -> None:
    desk = await Desk().begin()
    publish(desk, 1)
    await turns()
    desk.peers["rollout-0.0"].answer("load_version", EngineError("the engine is gone"))
    await lose(desk, "rollout-0")
    assert desk.failures == []


async def test_wrong_weights_are_refused() -> None:
    desk = await Desk().begin()
    publish(desk, 1)
    await turns()
    wrong = VersionLoaded(version=1, digest="other", transfer_seconds=0.0, logprobs=None)
    desk.peers["rollout-0.0"].answer("load_version", wrong)
    await turns()
    with pytest.raises(EngineError, match="digest other, the trainer published d1"):
        raise desk.failures[0]


# ---------------------------------------------------------------- while nothing rolls out


async def nothing_rolls_out(*, instances: int = 1) -> Desk:
    desk = await Desk(instances=instances).begin()
    desk.controller.end_phase("phase_ended")
    desk.fleet.follow(None)
    return desk


async def test_an_instance_that_is_back_while_nothing_rolls_out_has_what_the_others_have() -> None:
    desk = await nothing_rolls_out(instances=2)
    desk.fleet.published(published(1))
    await lose(desk, "rollout-0")
    peer = desk.join("rollout-0", start=1)
    await turns()
    assert [call.version for _, call in peer.asked] == [
        0
    ]  # version 1 is not asked of anybody; 0 may be under evaluation


async def test_a_version_that_is_retired_before_it_arrives_is_no_error_while_nothing_rolls_out() -> None:
    desk = await nothing_rolls_out()
    await lose(desk, "rollout-0")
    peer = desk.join("rollout-0", start=1)
    await turns()
    desk.fleet.published(published(1))
    peer.answer("load_version", WireError("version 0 was retired"))
    await turns()
    assert desk.failures == []
    assert desk.fleet.hosting(0) == []


async def test_loading_everywhere_waits_for_one_that_has_it_when_all_are_lost_meanwhile() -> None:
    desk = await nothing_rolls_out()
    desk.fleet.published(published(1))
    loading = asyncio.ensure_future(desk.fleet.load_everywhere(1))
    await turns()
    await lose(desk, "rollout-0")
    assert not loading.done()
    peer = desk.join("rollout-0", start=1)
    await turns()
    peer.answer("load_version", loaded(1))
    await loading
    assert len(desk.fleet.hosting(1)) == 1


@pytest.mark.parametrize("moment", range(12))
async def test_who_waited_for_a_version_goes_on_while_it_is_served(moment: int) -> None:
    desk = await Desk(instances=1).begin()
    publish(desk, 1)
    hosts: list[int] = []

    async def wait() -> None:
        await desk.fleet.wait_for(1, everywhere=False)
        hosts.append(len(desk.fleet.hosting(1)))

    waiting = asyncio.ensure_future(wait())
    await turns()
    desk.peers["rollout-0.0"].answer("load_version", loaded(1))
    for _ in range(moment):
        await asyncio.sleep(0)
    await lose(desk, "rollout-0")
    assert hosts in ([], [1])
    waiting.cancel()


async def test_waiting_for_every_instance_does_not_wait_for_one_that_is_lost() -> None:
    desk = await Desk().begin()
    publish(desk, 1)
    waiting = asyncio.ensure_future(desk.fleet.wait_for(1, everywhere=True))
    await turns()
    desk.peers["rollout-1.0"].answer("load_version", loaded(1))
    await turns()
    assert not waiting.done()
    await lose(desk, "rollout-0")
    await waiting


# ---------------------------------------------------------------- the self-check


class Trainer:
    """Never asked: the instance is lost before it answers."""

    async def call(self, method: str, *_: Any, **__: Any) -> Any:
        raise AssertionError(method)


async def test_an_instance_that_is_lost_during_the_self_check_ends_nothing() -> None:
    desk = await Desk().begin()
    checking = asyncio.ensure_future(desk.fleet.self_check(Trainer(), 0))  # type: ignore[arg-type]  # calls only
    await turns()
    assert desk.peers["rollout-0.0"].waits("generate")
    await lose(desk, "rollout-0")
    await lose(desk, "rollout-1")
    desk.join("rollout-0", start=1)
    await checking


async def test_one_that_cannot_be_asked_and_is_not_lost_fails_it() -> None:
    desk = await Desk(instances=1).begin()
    checking = asyncio.ensure_future(desk.fleet.self_check(Trainer(), 0))  # type: ignore[arg-type]  # calls only
    await turns()
    peer: Peer = desk.peers["rollout-0.0"]
    peer.answer("generate", WireError("refused"))
    with pytest.raises(WireError, match="refused"):
        await checking
