"""What the controller does with the work of nodes that are lost, and with what they still had to say."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.contract.columns import VERSION
from headrace.dataplane import Note
from headrace.errors import ContractError, RunError, StalenessError
from headrace.services.messages import EvaluationDone, Member, PlaceCall, WorkItem
from support.desk import Desk, failed, finished, loaded, played, stored, turns


async def given(desk: Desk, worker: str = "w.0") -> WorkItem:
    item = await desk.work(worker)
    assert item is not None
    return item


def lose(desk: Desk, name: str) -> tuple[int, ...]:
    _, displaced = desk.fleet.lost(name)
    desk.controller.instance_lost(displaced)
    return displaced


def place_call(item: WorkItem, trajectory: int, **changed: Any) -> PlaceCall:
    told: dict[str, Any] = {
        "worker": "w.0",
        "version": item.version,
        "group": item.group,
        "trajectory": trajectory,
        "instance": "rollout-0.0",
        "attempt": 0,
        "evaluation": False,
    }
    return PlaceCall(**(told | changed))


# ---------------------------------------------------------------- instances


async def test_a_trajectory_of_a_lost_instance_goes_on_elsewhere_under_its_version_as_its_second_try() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    (displaced,) = lose(desk, "rollout-0")
    place = await desk.controller.place(place_call(item, displaced))
    assert (place.instance, place.attempt) == ("rollout-1.0", 1)
    assert [e["attempt"] for e in desk.told("trajectory_failed")] == [0]
    assert desk.told("trajectory_started")[-1]["version"] == item.version


async def test_it_waits_until_an_instance_serves_its_version() -> None:
    desk = await Desk(instances=1).begin()
    item = await given(desk)
    lose(desk, "rollout-0")
    placing = asyncio.ensure_future(desk.controller.place(place_call(item, 0)))
    peer = desk.join("rollout-0", start=1)
    await turns()
    assert not placing.done()
    peer.answer("load_version", loaded(0))
    assert (await placing).instance == "rollout-0.1"


async def test_an_instance_lost_twice_in_a_row_costs_two_tries() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    (displaced,) = lose(desk, "rollout-0")
    await desk.controller.place(place_call(item, displaced))
    lose(desk, "rollout-1")
    assert [e["attempt"] for e in desk.told("trajectory_failed") if e["trajectory"] == displaced] == [0, 1]


async def test_a_trajectory_without_a_place_loses_no_try() -> None:
    desk = await Desk(instances=1, max_attempts=2).begin()
    item = await given(desk)
    lose(desk, "rollout-0")
    desk.controller.worker_lost("w.0")
    assert len(desk.told("trajectory_failed")) == len(item.members)
    assert desk.told("group_dropped") == []


async def test_an_answer_that_was_on_its_way_when_its_instance_was_lost_counts() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    (displaced,) = lose(desk, "rollout-0")
    await desk.say("w.0", *played(item))
    done = next(e for e in desk.told("trajectory_finished") if e["trajectory"] == displaced)
    assert done["instance"] == "rollout-0"
    assert len(desk.told("row_stored")) == len(item.members)


async def test_a_group_that_was_tried_too_often_is_dropped_and_its_own_task_is_in_quarantine() -> None:
    tasks = {0: 5, 1: 5}
    desk = await Desk(max_attempts=1, task_index=lambda group: tasks.get(group, group)).begin()
    first, second = await given(desk), await given(desk)
    lose(desk, "rollout-0")
    assert [e["group"] for e in desk.told("group_dropped")] == [first.group, second.group]
    assert desk.controller.attempts.quarantine == {5}


async def test_a_place_in_a_dropped_group_is_refused_and_its_failure_is_no_news() -> None:
    desk = await Desk(max_attempts=1).begin()
    item = await given(desk)
    (displaced,) = lose(desk, "rollout-0")
    with pytest.raises(RunError, match="not wanted any more"):
        await desk.controller.place(place_call(item, displaced))
    before = len(desk.events)
    await desk.say("w.0", failed(item))
    assert len(desk.events) == before
    assert desk.controller.tally.failed == {}


# ---------------------------------------------------------------- workers


async def test_a_lost_worker_s_group_is_played_by_another_as_the_next_try() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    desk.controller.worker_lost("w.0")
    again = await given(desk, "w.1")
    assert again.group == item.group
    assert [m.attempt for m in again.members] == [1, 1]
    assert [m.seed for m in again.members] == [m.seed for m in item.members]


async def test_what_a_lost_worker_still_says_and_asks_changes_nothing() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    desk.controller.worker_lost("w.0")
    before = len(desk.events)
    await desk.say("w.0", *played(item))
    assert await desk.work("w.0") is None
    assert len(desk.events) == before
    assert (await given(desk, "w.1")).group == item.group


async def test_a_worker_lost_after_its_instance_leaves_trajectories_that_find_their_place_later() -> None:
    desk = await Desk(instances=1).begin()
    await given(desk)
    lose(desk, "rollout-0")
    desk.controller.worker_lost("w.0")
    again = await given(desk, "w.1")
    assert [m.instance for m in again.members] == ["", ""]
    placing = [asyncio.ensure_future(desk.controller.place(place_call(again, t))) for t in (0, 1)]
    peer = desk.join("rollout-0", start=1)
    await turns()
    peer.answer("load_version", loaded(0))
    assert [(await place).instance for place in placing] == ["rollout-0.1"] * 2
    assert [e["attempt"] for e in desk.told("trajectory_started")[-2:]] == [1, 1]


async def test_a_lost_worker_s_evaluation_item_is_asked_anew_with_requests_of_its_own() -> None:
    desk = await Desk().begin()
    members = [Member(trajectory=t, task=t, instance="rollout-0.0", seed=t, attempt=t) for t in range(2)]
    item = WorkItem(
        kind="evaluation",
        group=1,
        version=0,
        split="evaluation",
        members=members,
        max_new_tokens=4,
        temperature=1.0,
    )
    heard: list[EvaluationDone] = []
    desk.controller.evaluate([item], heard.append)
    assert (await given(desk)).members == members
    desk.controller.worker_lost("w.0")
    again = await given(desk, "w.1")
    assert [m.attempt for m in again.members] == [1, 2]
    done = EvaluationDone(item=1, greedy=False, versions=[0], failed={}, samples=[])
    await desk.say("w.0", done)
    assert heard == []
    await desk.say("w.1", done, done)
    assert heard == [done]


async def test_an_evaluated_answer_of_a_lost_instance_goes_on_where_its_version_is_served_then() -> None:
    desk = await Desk(instances=1).begin()
    desk.controller.end_phase("phase_ended")
    desk.fleet.follow(None)  # nothing rolls out
    lose(desk, "rollout-0")
    item = WorkItem(
        kind="evaluation", group=1, version=0, split="evaluation", members=[], max_new_tokens=4, temperature=1.0
    )
    placing = asyncio.ensure_future(desk.controller.place(place_call(item, 3, evaluation=True, attempt=2)))
    await turns()
    assert not placing.done()
    peer = desk.join("rollout-0", start=1)
    await turns()
    peer.answer("load_version", loaded(0))
    place = await placing
    assert (place.instance, place.attempt) == ("rollout-0.1", 3)


async def test_a_group_whose_every_task_is_poison_is_still_given_a_task() -> None:
    desk = await Desk(max_attempts=1, task_index=lambda g: g % 2, next_task=lambda task: (task + 1) % 2).begin()
    desk.controller.attempts.quarantine.update({0, 1})
    assert {m.task for m in (await given(desk)).members} == {0}


async def test_a_task_in_quarantine_is_replaced_by_the_next() -> None:
    desk = await Desk().begin()
    desk.controller.attempts.quarantine.update({0, 1})
    assert {m.task for m in (await given(desk)).members} == {2}


# ---------------------------------------------------------------- the end of a phase


async def test_the_end_of_a_phase_leaves_no_item_for_anybody_and_its_rows_are_freed() -> None:
    desk = await Desk(batch_groups=2).begin()
    kept, item = await given(desk), await given(desk)
    await desk.say("w.0", *played(kept))
    queued = await given(desk)
    desk.controller.worker_lost("w.0")
    assert desk.controller.end_phase("phase_ended") == [kept.group, item.group, queued.group]
    assert await desk.work("w.1") is None
    await turns()
    assert desk.freed() == [member.trajectory for member in kept.members]
    with pytest.raises(ContractError, match="no partition"):
        desk.note(stored(item))


# ---------------------------------------------------------------- errors


async def test_a_report_of_what_may_not_be_ends_the_run_and_not_the_worker() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    await desk.say("w.0", finished(item, 0), finished(item, 1))
    with pytest.raises(StalenessError):
        desk.note(_of_version(item, 3))
    assert isinstance(desk.controller.failed.exception(), StalenessError)


async def test_an_error_of_the_log_ends_the_run_whoever_met_it() -> None:
    desk = await Desk().begin()

    def full(kind: str, **fields: Any) -> None:
        raise RunError("cannot write events.jsonl: No space left on device")

    desk.controller._groups._emit = full  # type: ignore[union-attr]
    assert await desk.work("w.0") is None
    assert "No space left" in str(desk.controller.failed.exception())


def _of_version(item: WorkItem, version: int) -> Note:
    told = stored(item)
    return msgspec.structs.replace(told, tags={**(told.tags or {}), VERSION: np.full(2, version, dtype=np.int64)})
