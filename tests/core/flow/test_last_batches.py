"""A phase has so many batches: nothing starts that none of them could hold."""

from __future__ import annotations

from collections.abc import Mapping

import hypothesis.strategies as st
import pytest
from hypothesis import given

from headrace.contract import FlowView, StalenessPolicy
from headrace.flow import Flow
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed
from support.flow_steps import carry_out, store, ticket


class Behind(MultiVersion):
    """Takes a batch, and publishes, only when as much is outstanding as it admits."""

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        return self.admit(view) == 0 and super().may_take(view, chosen)

    def may_publish(self, view: FlowView) -> bool:
        return self.admit(view) == 0 and super().may_publish(view)


POLICIES = [
    Synchronous(Synchronous.Settings()),
    DelayedUpdate(DelayedUpdate.Settings()),
    Windowed(Windowed.Settings(max_staleness=2)),
    MultiVersion(MultiVersion.Settings(max_staleness=3)),
    PartialRollout(PartialRollout.Settings(max_staleness=3)),
    Behind(MultiVersion.Settings(max_staleness=2)),
]


def flow_of(policy: StalenessPolicy, *, batches: float) -> Flow:
    flow = Flow(policy=policy, batch_groups=3, group_size=2, batches=batches)
    for name in ("a", "b"):
        flow.join(name, slots=8, live_versions=4, versions=(0,))
    return flow


def settle(flow: Flow) -> None:
    carry_out(flow)
    for version in flow.retirable():
        flow.retired(version)


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
@given(data=st.data(), batches=st.integers(1, 6))
def test_every_group_that_starts_is_trained_and_the_last_batch_is_full(
    policy: StalenessPolicy, data: st.DataObject, batches: int
) -> None:
    flow = flow_of(policy, batches=batches)
    generating: dict[int, int] = {}
    trained = steps = 0
    while trained < batches:
        steps += 1
        assert steps < 1000, "it waits for what cannot come"
        settle(flow)
        if (started := flow.next_ticket()) is not None:
            generating[started.group] = started.version
            if data.draw(st.booleans()):
                continue
        if generating:
            group = data.draw(st.sampled_from(sorted(generating)))
            store(flow, group, version=generating.pop(group))
        lease = flow.take_batch(now=0.0, ttl=1.0)
        if lease is not None and data.draw(st.booleans()):
            flow.release(lease.lease)
            lease = flow.take_batch(now=0.0, ttl=1.0)
        if lease is not None:
            flow.trained(lease.lease)
            trained += 1
        if flow.may_publish():
            flow.published(trained)
    assert flow.next_ticket() is None
    counts = flow.counts()
    assert (counts.dispatched, counts.trained) == (batches * 6, batches * 6)
    assert flow.end == flow.next_group == batches * 3


def test_a_dropped_group_is_replaced_in_the_last_batch_too() -> None:
    flow = flow_of(POLICIES[-1], batches=1)
    for _ in range(3):
        ticket(flow)
    assert flow.next_ticket() is None
    flow.drop_group(1, "failed")
    assert ticket(flow).group == 3
    assert flow.next_ticket() is None


def test_a_batch_whose_step_was_skipped_is_one_of_them() -> None:
    flow = flow_of(POLICIES[0], batches=2)
    for first, applied in ((0, False), (3, True)):
        for group in range(first, first + 3):
            ticket(flow)
            store(flow, group, version=0)
        lease = flow.take_batch(now=0.0, ttl=1.0)
        assert lease is not None
        flow.trained(lease.lease, applied=applied)
    flow.published(1)
    settle(flow)
    assert flow.next_ticket() is None


def test_where_ids_end_does_not_depend_on_how_many_groups_have_started() -> None:
    flow = flow_of(POLICIES[-1], batches=10)
    ends = [flow.end]
    while flow.next_ticket() is not None:
        ends.append(flow.end)
    assert set(ends) == {flow.next_group}
    assert len(ends) > 3


def test_groups_that_start_anew_in_a_resumed_flow_have_their_ids_already() -> None:
    before = flow_of(POLICIES[0], batches=2)
    for group in range(3):
        ticket(before)
        store(before, group, version=0)
    lease = before.take_batch(now=0.0, ttl=1.0)
    assert lease is not None
    before.trained(lease.lease)
    before.published(1)
    settle(before)
    ticket(before)
    state = before.state()
    after = Flow(policy=POLICIES[0], batch_groups=3, group_size=2, batches=1, state=state)
    assert after.end == before.end == 6


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: type(policy).__name__)
def test_after_the_last_batch_its_version_is_published_under_every_policy(policy: StalenessPolicy) -> None:
    """A policy may wait for the groups of the next batch to have started, and none do."""
    flow = flow_of(policy, batches=2)
    waiting: dict[int, int] = {}
    for _ in range(2):
        settle(flow)
        while (started := flow.next_ticket()) is not None:
            waiting[started.group] = started.version
        for group in list(waiting):
            store(flow, group, version=waiting.pop(group))
        lease = flow.take_batch(now=0.0, ttl=1.0)
        assert lease is not None
        flow.trained(lease.lease)
        while not flow.may_publish():
            started = flow.next_ticket()
            assert started is not None, "it waits for what cannot come"
            waiting[started.group] = started.version
        flow.published(lease.version + 1)
