"""Who of those that wait is answered, and that nothing is left of those that do not wait any more."""

from __future__ import annotations

import asyncio
import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.dataplane import Share
from headrace.dataplane.messages import LeaseCall, LookCall
from headrace.dataplane.waiting import Waiting
from headrace.errors import DeadlineError, RunError

PATIENCE = 60.0
OLD, NEW = 0, 5
"""Versions."""


def ask(groups: int, *, min_version: int = 0, wait: float = PATIENCE, **more: Any) -> LeaseCall:
    return LeaseCall("phase", "train", groups, groups, wait, PATIENCE, 0, min_version, **more)


def none_ready(consumer: str) -> dict[int, int]:
    """What a consumer could lease, by version."""
    return {}


class Shelf:
    """What is ready, by version; the oldest is given first."""

    def __init__(self, old: int, new: int) -> None:
        self.there = {OLD: old, NEW: new}

    def grant(self, call: LeaseCall) -> str | None:
        versions = [version for version in self.there if version >= call.min_version]
        if sum(self.there[version] for version in versions) < call.at_least:
            return None
        missing = call.at_least
        for version in versions:
            given = min(missing, self.there[version])
            self.there[version] -= given
            missing -= given
        return "granted"


class Queue:
    """What :class:`Waiting` is to do, by asking everybody."""

    def __init__(self) -> None:
        self.waiting = Waiting(none_ready)
        self.calls: list[tuple[LeaseCall, asyncio.Future[Any]]] = []
        """Of those that still wait, in the order in which they came."""

    def add(self, call: LeaseCall) -> None:
        self.calls.append((call, self.waiting.add(call)))

    def give_up(self, place: int) -> None:
        if self.calls:
            self.calls.pop(place % len(self.calls))[1].cancel()

    def serve(self, old: int, new: int) -> None:
        shelf, held_up, answered = Shelf(old, new), set(), []
        for call, future in sorted(self.calls, key=lambda waiter: waiter[0].at_least):
            if call.min_version not in held_up and shelf.grant(call) is not None:
                answered.append(future)
            else:
                held_up.add(call.min_version)
        self.waiting.serve(Shelf(old, new).grant)
        assert [future.done() for _, future in self.calls] == [future in answered for _, future in self.calls]
        self.calls = [waiter for waiter in self.calls if waiter[1] not in answered]

    async def settle(self) -> None:
        await asyncio.sleep(0)
        kept = sum(map(len, self.waiting._heaps.values()))
        assert len(self.waiting) == len(self.calls) <= kept == self.waiting._kept


STEPS = st.one_of(
    st.tuples(st.just("add"), st.builds(ask, st.integers(1, 4), min_version=st.sampled_from([OLD, NEW]))),
    st.tuples(st.just("give_up"), st.integers(0, 40)),
    st.tuples(st.just("serve"), st.integers(0, 6), st.integers(0, 6)),
    st.tuples(st.just("settle")),
)


@given(steps=st.lists(STEPS, min_size=5, max_size=60))
def test_the_smallest_are_answered_first_and_one_that_must_wait_holds_up_only_its_like(
    steps: list[tuple[Any, ...]],
) -> None:
    async def run() -> None:
        queue = Queue()
        for name, *arguments in steps:
            done = getattr(queue, name)(*arguments)
            if done is not None:
                await done
        await queue.settle()
        for _, future in queue.calls:
            future.cancel()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.dataplane.waiting._SPARE", 2)
        asyncio.run(run())


async def test_of_several_kinds_the_smallest_is_answered_first_and_of_two_alike_the_first_that_came() -> None:
    waiting = Waiting(none_ready)
    asked = [waiting.add(ask(groups, min_version=version)) for version, groups in enumerate([3, 2, 1, 1])]
    order: list[int] = []
    waiting.serve(lambda call: order.append(call.min_version) or "granted")
    assert order == [2, 3, 1, 0]
    assert all(answer.done() for answer in asked)


async def test_those_of_a_kind_that_all_gave_up_are_forgotten_and_others_are_served() -> None:
    waiting = Waiting(none_ready)
    patient = waiting.add(ask(1))
    for _ in range(200):
        waiting.add(ask(1, min_version=NEW)).cancel()
        await asyncio.sleep(0)
    assert sum(map(len, waiting._heaps.values())) < 100
    waiting.serve(Shelf(1, 0).grant)
    assert patient.result() == "granted"


async def test_nothing_is_left_of_one_that_was_answered_long_before_its_deadline() -> None:
    waiting = Waiting(none_ready)
    left = weakref.ref(waiting.add(ask(1)))
    waiting.serve(Shelf(1, 0).grant)
    await asyncio.sleep(0)
    gc.collect()
    assert left() is None


async def test_those_that_ask_for_the_same_batch_hold_up_each_other_and_nobody_else() -> None:
    waiting = Waiting(none_ready)
    first = [waiting.add(ask(1, share=Share(0, rank, 2))) for rank in range(2)]
    other, plain = waiting.add(ask(1, share=Share(1, 0, 2))), waiting.add(ask(1))
    asked: list[LeaseCall] = []

    def grant(call: LeaseCall) -> str | None:
        asked.append(call)
        return "granted" if call.share is None or call.share.batch == 1 else None

    waiting.serve(grant)
    assert [future.done() for future in (*first, other, plain)] == [False, False, True, True]
    assert len(asked) == 3
    for future in first:
        future.cancel()


async def test_one_that_has_chosen_holds_up_nobody() -> None:
    waiting = Waiting(none_ready)
    chosen, plain = waiting.add(ask(1, chosen=np.array([7]))), waiting.add(ask(1))
    waiting.serve(lambda call: None if call.chosen is not None else "granted")
    assert (chosen.done(), plain.done()) == (False, True)
    chosen.cancel()


async def test_of_those_that_look_one_that_has_seen_all_holds_up_none_that_has_seen_less() -> None:
    waiting = Waiting(none_ready)
    looks = [waiting.add(LookCall(ask(1), 1, PATIENCE, after)) for after in (None, 3, 4, 4)]
    waiting.serve(lambda look: "seen" if look.after != 4 else None)
    assert [look.done() for look in looks] == [True, True, False, False]
    newest = waiting.add(LookCall(ask(1, min_version=NEW), 1, PATIENCE, 4))
    waiting.serve(lambda look: "seen" if look.lease.min_version == NEW else None)
    assert [look.done() for look in (*looks[2:], newest)] == [False, False, True]
    for look in looks:
        look.cancel()


async def test_the_one_that_waits_longest_is_told_apart_from_those_that_gave_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    waiting, now = Waiting(none_ready), 0.0
    monkeypatch.setattr("headrace.dataplane.waiting.monotonic", lambda: now)
    assert waiting.longest(7.0) == 0
    gone = waiting.add(ask(1))
    now = 2.0
    patient = waiting.add(ask(1))
    now = 3.0
    latest = waiting.add(ask(2))
    assert waiting.longest(7.0) == 7.0
    gone.cancel()
    assert waiting.longest(7.0) == 5.0
    patient.cancel()
    assert waiting.longest(7.0) == 4.0
    latest.cancel()
    assert waiting.longest(7.0) == 0


async def test_when_it_is_over_those_that_wait_are_told_and_others_may_come() -> None:
    waiting = Waiting(none_ready)
    gone, patient = waiting.add(ask(1)), waiting.add(ask(2))
    gone.cancel()
    waiting.end(RunError("it is over"))
    with pytest.raises(RunError, match="it is over"):
        await patient
    await asyncio.sleep(0)
    assert (len(waiting), waiting._kept, waiting._heaps) == (0, 0, {})
    late = waiting.add(ask(1))
    waiting.serve(Shelf(1, 0).grant)
    assert await late == "granted"
    await asyncio.sleep(0)
    assert (len(waiting), waiting._kept) == (0, 0)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (ask(2, wait=0.0), "there were no 2 groups of partition 'phase' for train within 0 s: 0 were ready"),
        (
            LookCall(ask(2, wait=0.0), 1, 0.0),
            "there were no 2 groups of partition 'phase' for train within 0 s: 0 were ready",
        ),
        (
            LookCall(ask(2, wait=0.0), 1, 0.0, 3),
            "there were no 2 groups of partition 'phase' for train that its order wants within 0 s: 0 were ready",
        ),
    ],
    ids=["lease", "look", "look for more"],
)
async def test_one_that_waited_in_vain_is_told_for_what(call: LeaseCall | LookCall, text: str) -> None:
    with pytest.raises(DeadlineError) as told:
        await Waiting(none_ready).add(call)
    assert told.value.message == text
