"""A version that comes in the middle of answers, between the controller and instances that do what the test says."""

from __future__ import annotations

import pytest

from headrace.contract import Interruption, StalenessPolicy
from headrace.services.messages import LoadCall, PlaceCall, WorkItem
from headrace.services.request_messages import SwitchCall
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from support.desk import Desk, Peer, finished, loaded, published, stored, switched, turns


def partial_rollout() -> PartialRollout:
    return PartialRollout(PartialRollout.Settings(max_staleness=2, keep_kv=True))


async def begun(policy: StalenessPolicy | None = None, **changed: int) -> tuple[Desk, Peer, WorkItem]:
    """One instance; a group is being answered, and version 1 is out."""
    desk = await Desk(instances=1, policy=policy or partial_rollout(), **changed).begin()
    item = await desk.work("w.0")
    assert item is not None
    publish(desk, 1)
    await turns()
    return desk, desk.peers["rollout-0.0"], item


def publish(desk: Desk, version: int) -> None:
    desk.fleet.published(published(version))
    desk.flow._batch_trained = True
    desk.flow.published(version)
    desk.controller.pump()


async def answer(peer: Peer, method: str, value: object) -> None:
    peer.answer(method, value)
    await turns()


async def test_answers_go_on_under_a_version_only_after_it_was_verified() -> None:
    desk, peer, _ = await begun()
    interruption = Interruption(keep_kv=True)
    assert peer.asked[-1] == ("load_version", LoadCall(version=1, probe=None, interruption=interruption))
    await answer(peer, "load_version", loaded(1))
    assert desk.told("instance_version")[-1]["version"] == 1
    assert peer.asked[-1] == ("switch_version", SwitchCall(version=1, interruption=interruption))
    assert desk.flow.hosting(1) == (), "nothing new is placed there before it has switched"
    await answer(peer, "switch_version", switched((0, 0, 3), prefilled_tokens=5))
    times = {"pause_seconds": 0.25, "resume_seconds": 0.5, "stopped_seconds": 1.0}
    assert desk.told("instance_switched") == [
        {"instance": "rollout-0", "version": 1, "interrupted": [(0, 0, 3)], "prefilled_tokens": 5, **times}
    ]
    assert [desk.flow.version_of(trajectory) for trajectory in (0, 1)] == [1, 1]
    assert desk.flow.hosting(0) == (), "the version before is retired at once"
    tally = desk.controller.tally
    assert (tally.interrupted, tally.prefilled_again) == (1, 5)
    assert {name: getattr(tally, name) for name in times} == times
    assert not desk.failures


async def test_an_instance_with_room_for_one_version_has_only_the_new_one_then() -> None:
    desk, peer, _ = await begun(live_versions=1)
    await answer(peer, "load_version", loaded(1))
    assert desk.flow.hosting(0) == ("rollout-0",)
    await answer(peer, "switch_version", switched())
    assert (desk.flow.hosting(0), desk.flow.hosting(1)) == ((), ("rollout-0",))
    assert desk.fleet.hosting(0) == []
    assert desk.flow.unplaced() == ()
    assert "retire_version" not in [method for method, _ in peer.asked]


async def test_a_policy_that_pins_trajectories_has_nobody_switch() -> None:
    desk, peer, _ = await begun(MultiVersion(MultiVersion.Settings(max_staleness=2)))
    assert peer.asked[-1] == ("load_version", LoadCall(version=1, probe=None))
    await answer(peer, "load_version", loaded(1))
    assert "switch_version" not in [method for method, _ in peer.asked]
    assert desk.flow.hosting(1) == ("rollout-0",)
    assert [desk.flow.version_of(trajectory) for trajectory in (0, 1)] == [0, 0]


async def test_of_an_instance_that_is_lost_while_it_switches_nothing_is_told() -> None:
    desk, peer, _ = await begun()
    await answer(peer, "load_version", loaded(1))
    _, displaced = desk.fleet.lost("rollout-0")
    desk.controller.instance_lost(displaced)
    await turns()
    assert not desk.failures
    assert desk.told("instance_switched") == []
    desk.join("rollout-0", start=1)
    await turns()
    await answer(desk.peers["rollout-0.1"], "load_version", loaded(1))
    await answer(desk.peers["rollout-0.1"], "switch_version", switched())
    place = PlaceCall(
        worker="w.0", version=0, group=0, trajectory=0, instance="rollout-0.0", attempt=0, evaluation=False
    )
    assert (await desk.controller.place(place)).instance == "rollout-0.1"
    again = [e for e in desk.told("trajectory_started") if e["attempt"] == 1]
    assert {e["version"] for e in again} == {1}, "what was lost begins anew, under the newest version"


async def test_a_trajectory_of_several_versions_is_counted_and_stored_as_its_oldest_token_says() -> None:
    desk, peer, item = await begun()
    await answer(peer, "load_version", loaded(1))
    await answer(peer, "switch_version", switched((0, 0, 2)))
    await desk.say("w.0", finished(item, 0, [0, 0, 1]), finished(item, 1, [1, 1, 1]))
    desk.note(stored(item, oldest=[0, 1]))
    assert desk.controller.tally.mixed == 1
    assert [e["version"] for e in desk.told("row_stored")] == [0, 1]
    assert desk.flow.view().ready == {0: 1}


@pytest.mark.parametrize("mask_older", [True, False])
async def test_workers_are_told_which_tokens_to_leave_out(mask_older: bool) -> None:
    desk = await Desk(policy=partial_rollout(), mask_older=mask_older).begin()
    item = await desk.work("w.0")
    assert item is not None
    assert item.mask_older == mask_older
