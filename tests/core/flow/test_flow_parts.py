"""A batch that is taken in parts is the batch that is taken at once."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract import StalenessPolicy
from headrace.flow import BatchLease, Flow
from headrace_staleness.deadlines import Deadlines
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed
from support.flow_steps import advance, store, ticket

BATCH = 3
POLICIES: list[StalenessPolicy] = [
    Synchronous(Synchronous.Settings()),
    DelayedUpdate(DelayedUpdate.Settings(max_staleness=1)),
    Windowed(Windowed.Settings(max_staleness=2)),
    MultiVersion(MultiVersion.Settings(max_staleness=1)),
    MultiVersion(MultiVersion.Settings(max_staleness=3)),
    MultiVersion(MultiVersion.Settings(max_staleness=3, waits="batch")),
    PartialRollout(PartialRollout.Settings(max_staleness=2, waits="batch")),
]


def flow_of(policy: StalenessPolicy) -> Flow:
    flow = Flow(policy=policy, batch_groups=BATCH, group_size=2)
    flow.join("a", slots=100, live_versions=100, versions=(0,))
    return flow


class Twins:
    """Two flows to which the same happens, but that batches of one are taken in parts."""

    def __init__(self, policy: StalenessPolicy) -> None:
        self.whole, self.parted = flow_of(policy), flow_of(policy)
        self.holds_back = isinstance(policy, Deadlines) and policy.waits == "batch"
        """Whether groups may have to wait for the publication that follows a batch taken in parts."""
        self.held_back = 0
        self.flying: list[tuple[int, int]] = []
        """Groups with their versions."""
        self.parts: set[int] = set()
        self.batch: tuple[BatchLease, BatchLease] | None = None
        self.version = 0
        self.trained = False
        self.batches = 0

    def step(self, random: Random) -> None:
        random.choice([self.start, self.store, self.store, self.part, self.part, self.take, self.train, self.publish])(
            random
        )
        whole, parted = self.whole.view(), self.parted.view()
        assert parted.last_part <= whole.last_part == whole.batch_taken * BATCH
        assert replace(whole, last_part=0) == replace(parted, last_part=0), "nothing else tells of parts"
        assert self.whole.counts() == self.parted.counts()

    def start(self, random: Random) -> None:
        second = self.parted.next_ticket()
        if second is None and self.holds_back and self.parted.view().batch_taken:
            self.held_back += 1
            return
        assert self.whole.next_ticket() == second
        if second is not None:
            self.flying.append((second.group, second.version))

    def store(self, random: Random) -> None:
        if not self.flying:
            return
        group, version = self.flying.pop(random.randrange(len(self.flying)))
        if random.random() < 0.1 and group not in self.parts:
            assert self.whole.drop_group(group, "lost") == self.parted.drop_group(group, "lost")
            return
        for flow in (self.whole, self.parted):
            for trajectory in range(2 * group, 2 * group + 2):
                assert flow.stored(trajectory, version=version, tokens=1, nbytes=1)

    def part(self, random: Random) -> None:
        part = self.parted.take_part(now=0.0, ttl=1.0)
        if part is None:
            return
        assert self.batch is None
        assert not self.trained
        assert not self.parts & set(part.groups), "a group is in one part"
        if random.random() < 0.2:
            self.parted.release(part.lease)
        else:
            self.parts |= set(part.groups)
            with pytest.raises(ValueError, match="in the batch"):
                self.parted.drop_group(part.groups[0], "lost")

    def take(self, random: Random) -> None:
        first, second = self.whole.take_batch(now=0.0, ttl=1.0), self.parted.take_batch(now=0.0, ttl=1.0)
        assert (first is None) == (second is None)
        if first is None or second is None:
            return
        assert (first.version, first.groups, first.rows) == (second.version, second.groups, second.rows)
        assert self.parts <= set(second.groups), "what was in a part is in the batch"
        self.batch = first, second

    def train(self, random: Random) -> None:
        if self.batch is None:
            return
        first, second = self.batch
        assert self.whole.trained(first.lease) == self.parted.trained(second.lease)
        self.batch, self.trained = None, True
        self.parts.clear()
        self.batches += 1

    def publish(self, random: Random) -> None:
        assert self.whole.may_publish() == self.parted.may_publish()
        if not self.whole.may_publish():
            return
        self.version, self.trained = self.version + 1, False
        for flow in (self.whole, self.parted):
            flow.published(self.version)
            flow.committed("a", self.version)


@given(policy=st.sampled_from(POLICIES), seed=st.integers(0, 2**32 - 1))
def test_parts_change_neither_when_a_batch_is_taken_nor_what_is_in_it(policy: StalenessPolicy, seed: int) -> None:
    twins, random = Twins(policy), Random(seed)
    for _ in range(150):
        twins.step(random)


def test_every_policy_trains_in_parts() -> None:
    for policy in POLICIES:
        twins, random = Twins(policy), Random(1)
        for _ in range(2000):
            twins.step(random)
        assert twins.batches > 10
        assert not twins.holds_back or twins.held_back > 10


def next_part(flow: Flow) -> tuple[int, ...]:
    part = flow.take_part(now=0.0, ttl=1.0)
    return () if part is None else part.groups


def test_a_group_is_in_a_part_when_there_is_room_for_it_whatever_comes_before_it() -> None:
    flow = flow_of(MultiVersion(MultiVersion.Settings(max_staleness=3)))
    for _ in range(2 * BATCH):
        ticket(flow)
    advance(flow, (0, 1, 2), version=0)
    flow.committed("a", 1)
    assert [ticket(flow).version for _ in range(2)] == [1, 1]
    for group in (6, 7):
        store(flow, group, version=1)
    assert next_part(flow) == (), "3, 4 and 5, of version 0, are a batch"
    flow.drop_group(5, "lost")
    assert next_part(flow) == (6,), "of version 1, the first that was ready"
    store(flow, 3, version=0)
    assert next_part(flow) == (3,)
    flow.drop_group(4, "lost")
    assert next_part(flow) == (7,)
    assert next_part(flow) == ()
    batch = flow.take_batch(now=0.0, ttl=1.0)
    assert batch is not None
    assert batch.groups == (3, 6, 7)


def test_a_part_that_is_given_back_is_taken_with_the_batch() -> None:
    flow = flow_of(Synchronous(Synchronous.Settings()))
    for group in range(BATCH):
        assert flow.next_ticket() is not None
        for trajectory in (2 * group, 2 * group + 1):
            flow.stored(trajectory, version=0, tokens=1, nbytes=1)
    part = flow.take_part(now=0.0, ttl=1.0)
    assert part is not None
    assert part.groups == (0, 1, 2)
    assert [lease.lease for lease in flow.expire(1.0)] == [part.lease]
    batch = flow.take_batch(now=2.0, ttl=1.0)
    assert batch is not None
    assert batch.groups == part.groups
    with pytest.raises(ValueError, match="not held"):
        flow.trained(part.lease)
