"""Dynamic sampling: batches of groups whose rewards differ, and nothing else (DAPO, arXiv:2503.14476, section 3.2).

Case H08.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np
import pytest

from headrace.contract.columns import REWARD
from headrace.dataplane import Note
from headrace.errors import RunError
from headrace.flow.group_table import LATE
from headrace.services.messages import WorkItem
from support.desk import Desk, finished, loaded, published, stored, turns

EQUAL, DIFFERENT = (1.0, 1.0), (0.0, 1.0)


def rewarded(item: WorkItem, rewards: Sequence[float]) -> Note:
    """A group's rows, as a storage unit tells of them."""
    note = stored(item)
    assert note.tags is not None
    return msgspec.structs.replace(note, tags={**note.tags, REWARD: np.array(rewards, dtype=np.float32)})


def member_of(note: Note, place: int) -> Note:
    """One row of them."""
    assert note.rows is not None
    assert note.tags is not None
    one = slice(place, place + 1)
    return msgspec.structs.replace(
        note,
        rows=note.rows[one],
        count=1,
        nbytes=note.nbytes[one],
        tokens=note.tokens[one],
        tags={name: tag[one] for name, tag in note.tags.items()},
    )


async def play(desk: Desk, rewards: Sequence[float]) -> list[int]:
    """The next group, with these rewards; which of its rows storage should not keep."""
    item = await desk.work("w.0")
    assert item is not None
    await desk.say("w.0", *(finished(item, member.trajectory) for member in item.members))
    return desk.note(rewarded(item, rewards))


async def play_all(desk: Desk, groups: Iterable[Sequence[float]]) -> None:
    for rewards in groups:
        await play(desk, rewards)


async def next_batch(desk: Desk) -> tuple[int, ...]:
    """The groups of the next batch, which is trained, and its version published and loaded."""
    part = await desk.controller.take_batch()
    desk.controller.trained(part.lease, applied=True)
    version = part.lease.version + 1
    desk.fleet.published(published(version))
    desk.flow.published(version)
    desk.controller.pump()
    await turns()
    for peer in desk.peers.values():
        if peer.waits("load_version"):
            peer.answer("load_version", loaded(version))
    await turns()
    return part.lease.groups


async def test_a_group_of_equal_rewards_is_dropped_and_another_starts_in_its_place() -> None:
    desk = await Desk(max_generated=4).begin()
    assert await play(desk, EQUAL) == [LATE, LATE]
    assert [(e["group"], e["reason"]) for e in desk.told("group_dropped")] == [(0, "uninformative")]
    assert await play(desk, DIFFERENT) == []
    part = await desk.controller.take_batch()
    assert part.lease.groups == (1,)
    assert desk.controller.tally.uninformative == 1


async def test_rewards_are_equal_when_no_algorithm_tells_them_apart() -> None:
    desk = await Desk(max_generated=4).begin()
    assert await play(desk, (100.0, 100.0 + 5e-5)) == [LATE, LATE]
    assert await play(desk, (0.0, 5e-5)) == []


async def test_without_it_they_are_trained() -> None:
    desk = await Desk().begin()
    await play(desk, EQUAL)
    assert (await desk.controller.take_batch()).lease.groups == (0,)


async def test_answers_that_are_all_worth_as_much_as_the_greedy_one_teach_nothing() -> None:
    desk = await Desk(max_generated=4, greedy=True).begin()
    assert await play(desk, EQUAL) == [LATE, LATE]
    assert await play(desk, DIFFERENT) == []


async def test_rows_of_such_a_group_that_were_stored_before_are_freed() -> None:
    desk = await Desk(max_generated=4, by_row=True).begin()
    item = await desk.work("w.0")
    assert item is not None
    note = rewarded(item, EQUAL)
    assert desk.note(member_of(note, 0)) == []
    assert desk.note(member_of(note, 1)) == [LATE]
    await turns()
    assert 0 in desk.freed()


async def test_a_group_that_fails_half_way_leaves_no_rewards_behind() -> None:
    desk = await Desk(max_generated=4, by_row=True, max_attempts=1).begin()
    item = await desk.work("w.0")
    assert item is not None
    desk.note(member_of(rewarded(item, DIFFERENT), 0))
    desk.controller.unkept([item.group])
    assert [e["reason"] for e in desk.told("group_dropped")] == ["storage_lost"]
    assert await play(desk, EQUAL) == [LATE, LATE]


async def test_H08_batches_are_full_and_a_surplus_is_carried_to_the_next() -> None:
    desk = await Desk(batch_groups=4, max_generated=40).begin()
    rewards = [DIFFERENT if number % 3 == 0 else EQUAL for number in range(60)]
    await play_all(desk, rewards[:14])  # five of them
    assert await next_batch(desk) == (0, 3, 6, 9)
    await play_all(desk, rewards[14:22])
    assert await next_batch(desk) == (12, 15, 18, 21)


async def test_H08_a_reward_that_is_always_equal_ends_the_run_and_says_how_many_were_accepted() -> None:
    desk = await Desk(max_generated=3).begin()
    await play(desk, EQUAL)
    await play(desk, EQUAL)
    with pytest.raises(RunError, match="accepted 0 of 3 groups"):
        await play(desk, EQUAL)
    with pytest.raises(RunError, match="accepted 0 of 3 groups"):
        await desk.controller.failed


async def test_what_a_batch_took_is_not_counted_for_the_next() -> None:
    desk = await Desk(max_generated=3).begin()
    for _ in range(3):
        await play_all(desk, [EQUAL, EQUAL, DIFFERENT])
        await next_batch(desk)
    assert not desk.controller.failed.done()
