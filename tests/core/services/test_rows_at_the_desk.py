"""What the controller does when storage loses rows, cannot keep them, or gets those of a checkpoint back."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.dataplane import Note
from headrace.dataplane.messages import Unkept
from headrace.errors import RunError
from headrace.flow import Flow, FlowState
from headrace.flow.group_table import DUPLICATE, LATE
from headrace.flow.records import StoredGroup
from headrace.run.columns import phase_partition
from headrace.services.messages import WorkItem
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous
from support.desk import COLUMNS, PARTITION, Desk, plan, played, stored


async def given(desk: Desk, worker: str = "w.0") -> WorkItem:
    item = await desk.work(worker)
    assert item is not None
    return item


async def test_a_lost_storage_unit_costs_the_groups_it_held_and_no_other() -> None:
    desk = await Desk(batch_groups=3).begin()
    kept, elsewhere, under_way = await given(desk), await given(desk), await given(desk)
    await desk.say("w.0", *played(kept), *played(elsewhere)[:-1])
    desk.note(stored(elsewhere), unit=2)
    desk.ledger.lose("storage-0.0")
    assert [(e["group"], e["reason"]) for e in desk.told("group_dropped")] == [(kept.group, "storage_lost")]
    await desk.say("w.0", *played(under_way)[:-1])
    desk.note(stored(under_way), unit=2)
    assert desk.flow.counts().buffered == len(under_way.members) + len(elsewhere.members)


async def test_what_a_storage_unit_tells_that_is_lost_by_then_is_refused_and_the_rows_may_be_put_into_another() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    await desk.say("w.0", *played(item)[:-1])
    desk.ledger.lose("storage-0.0")
    with pytest.raises(RunError, match="not in service"):
        desk.note(stored(item))
    assert desk.told("row_stored") == []
    assert desk.note(stored(item), unit=2) == []
    assert len(desk.told("row_stored")) == len(item.members)


async def test_rows_that_are_put_twice_are_kept_once() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    await desk.say("w.0", *played(item))
    assert desk.note(stored(item), unit=2) == [LATE, LATE]
    assert len(desk.told("row_stored")) == len(item.members)


async def test_rows_of_a_worker_that_was_given_up_are_refused_and_those_of_the_next_are_kept() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    await desk.say("w.0", *played(item)[:-1])
    desk.controller.worker_lost("w.0")
    assert desk.note(msgspec.structs.replace(stored(item), producer="w.0")) == [LATE, LATE]
    again = await given(desk, "w.1")
    await desk.say("w.1", *played(again))
    assert desk.flow.counts().buffered == len(again.members)


async def test_a_batch_whose_rows_were_lost_is_released_dropped_and_followed_by_another() -> None:
    desk = await Desk().begin()
    await desk.say("w.0", *played(await given(desk)))
    part = await desk.controller.take_batch()
    desk.ledger.lose("storage-0.0")
    assert desk.told("group_dropped") == []  # the trainer may have read it
    desk.controller.batch_lost(part, part.lease.groups)
    assert [kind for kind, _ in desk.events[-2:]] == ["batch_released", "group_dropped"]
    item = await given(desk)
    await desk.say("w.0", *played(item)[:-1])
    desk.note(stored(item), unit=2)
    assert (await desk.controller.take_batch()).lease.groups != part.lease.groups


def returned(*groups: int) -> Note:
    """What a unit tells of rows that a checkpoint kept."""
    rows = np.array([2 * group + member for group in groups for member in range(2)])
    size = np.full(len(rows), 10, dtype=np.int64)
    return Note(PARTITION, rows, len(rows), COLUMNS.first, size, size, 0)


async def test_rows_that_are_put_back_and_lost_with_their_unit_are_put_again_and_cost_nothing() -> None:
    desk = await Desk().begin()
    desk.controller.end_phase("phase_ended")
    kept = tuple(StoredGroup(group=group, version=0, oldest=0, tokens=(5, 5)) for group in range(2))
    state = FlowState(version=0, next_group=2, stored=kept, unfinished=(), trained=0, dropped={})
    policy = MultiVersion(MultiVersion.Settings(max_staleness=2))
    flow = Flow(policy=policy, batch_groups=1, group_size=2, columns=COLUMNS, state=state)
    rows = desk.controller.open_rows(flow, phase_partition(PARTITION, COLUMNS, group_size=2))
    assert desk.note(returned(0)) == desk.note(returned(1), unit=2) == []
    desk.ledger.lose("storage-0.0")
    assert (rows.displaced, flow.ledger.nbytes) == (1, 20)
    assert desk.note(returned(0, 1), unit=2) == [0, 0, DUPLICATE, DUPLICATE]
    assert desk.note(returned(0, 1), unit=2) == [DUPLICATE] * 4, "said again, when all were back"
    desk.fleet.follow(flow)
    desk.controller.begin_phase(flow, plan())
    part = await desk.controller.take_batch()
    assert part.lease.groups == (0,)
    assert (rows.whereabouts(np.arange(4))["units"] == 2).all()
    assert desk.told("group_dropped") == []
    assert not desk.controller.failed.done()


async def test_nothing_but_what_a_checkpoint_kept_is_taken_before_the_phase_begins() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    desk.controller.end_phase("phase_ended")
    flow = Flow(policy=Synchronous(Synchronous.Settings()), batch_groups=1, group_size=2, columns=COLUMNS)
    desk.controller.open_rows(flow, phase_partition(PARTITION, COLUMNS, group_size=2))
    with pytest.raises(RunError, match="takes only what it had"):
        desk.note(stored(item))
    assert not desk.controller.failed.done()


def unkept(desk: Desk, *groups: int, **changed: Any) -> Unkept:
    said: dict[str, Any] = {"unit": 1, "partition": PARTITION, "made": desk.controller.rows.made, "new": False}
    return Unkept(**(said | changed), groups=list(groups))


async def test_what_a_storage_could_not_keep_of_a_group_in_training_is_left_to_the_trainer_to_miss() -> None:
    """A stage's columns make a group whole before the unit that tells of them has stored them."""
    desk = await Desk().begin()
    await desk.say("w.0", *played(await given(desk)))
    part = await desk.controller.take_batch()
    desk.ledger.unkept(unkept(desk, *part.lease.groups))
    assert desk.told("group_dropped") == []
    desk.controller.batch_lost(part, part.lease.groups)
    assert [e["group"] for e in desk.told("group_dropped")] == list(part.lease.groups)
    desk.ledger.unkept(unkept(desk, *part.lease.groups))
    assert len(desk.told("group_dropped")) == 1


async def test_what_a_storage_says_it_could_not_keep_costs_a_group_once_however_often_it_says_so() -> None:
    desk = await Desk(batch_groups=2).begin()
    item, other = await given(desk), await given(desk)
    await desk.say("w.0", *played(item), *played(other))
    for _ in range(2):
        desk.ledger.unkept(unkept(desk, item.group, 10**9))
    assert [(e["group"], e["reason"]) for e in desk.told("group_dropped")] == [(item.group, "storage_lost")]
    assert desk.flow.knows(other.group)


async def test_what_a_storage_could_not_keep_of_a_phase_that_ended_costs_nothing_in_the_next() -> None:
    desk = await Desk().begin()
    item = await given(desk)
    await desk.say("w.0", *played(item))
    late = unkept(desk, item.group)
    desk.controller.end_phase("phase_ended")
    desk.ledger.unkept(late)
    policy = Synchronous(Synchronous.Settings())
    flow = Flow(policy=policy, batch_groups=1, group_size=2, rollout=False, columns=COLUMNS)
    desk.controller.open_rows(flow, phase_partition(PARTITION, COLUMNS, group_size=2))
    desk.controller.begin_phase(flow, plan(rollout=False))
    again = await given(desk)
    assert again.group == item.group
    desk.ledger.unkept(late)
    assert flow.knows(item.group)
