"""Cases about versions, staleness, conservation and counters, as far as the flow decides them."""

from __future__ import annotations

import heapq

import numpy as np
import pytest

from headrace.contract import FlowView
from headrace.errors import StalenessError
from headrace.flow import BatchLease, Flow, Ticket
from headrace.flow.batching import mini_batches
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed


def multi_version(max_staleness: int, outstanding_batches: float | None = None) -> MultiVersion:
    return MultiVersion(MultiVersion.Settings(max_staleness=max_staleness, outstanding_batches=outstanding_batches))


def flow_of(
    policy: MultiVersion | Synchronous | Windowed,
    *,
    batch_groups: int,
    group_size: int = 1,
    version: int = 0,
    first_group: int = 0,
    slots: int = 10_000,
) -> Flow:
    flow = Flow(
        policy=policy, batch_groups=batch_groups, group_size=group_size, version=version, first_group=first_group
    )
    flow.join("a", slots=slots, live_versions=8, versions=(version,))
    return flow


def tickets(flow: Flow) -> list[Ticket]:
    found = []
    while (ticket := flow.next_ticket()) is not None:
        found.append(ticket)
    return found


def store(flow: Flow, ticket: Ticket) -> None:
    for trajectory in ticket.trajectories:
        assert flow.stored(trajectory, version=ticket.version, tokens=1, nbytes=1)


def take(flow: Flow) -> BatchLease | None:
    return flow.take_batch(now=0.0, ttl=1.0)


def publish(flow: Flow) -> int:
    version = flow.view().version + 1
    flow.published(version)
    for switch in flow.switches():
        for old in switch.retire:
            flow.retired_on(switch.instance, old)
        if switch.load is not None:
            flow.committed(switch.instance, switch.load)
    return version


def train_and_publish(flow: Flow) -> BatchLease:
    lease = take(flow)
    assert lease is not None
    flow.trained(lease.lease)
    publish(flow)
    return lease


def test_F01_the_bound_holds_right_after_a_restart() -> None:
    before = flow_of(multi_version(2), batch_groups=4, version=0)
    old = tickets(before)
    for _ in range(5):
        for ticket in old:
            store(before, ticket)
        train_and_publish(before)
        old = tickets(before)
    version, first_group = before.view().version, before.next_group
    outstanding = before.view().outstanding
    assert (version, outstanding) == (5, 8)

    after = flow_of(multi_version(2), batch_groups=4, version=version, first_group=first_group)
    fresh = tickets(after)
    assert len(fresh) == after.view().outstanding == 8, "the restart does not start more than the bound allows"
    assert {ticket.version for ticket in fresh} == {version}
    for ticket in old:
        for trajectory in ticket.trajectories:
            assert not after.stored(trajectory, version=ticket.version, tokens=1, nbytes=1), "from before the restart"
    assert after.counts().refused == {"unknown": len(old)} == {"unknown": 4}
    for _ in range(6):
        for ticket in fresh:
            store(after, ticket)
        lease = train_and_publish(after)
        fresh_by_group = {ticket.group: ticket.version for ticket in fresh}
        assert all(lease.version - fresh_by_group.get(group, lease.version - 1) <= 2 for group in lease.groups)
        fresh = tickets(after)


@pytest.mark.parametrize("limit", [0, 1, 2, 3])
def test_F02_limit_n_means_at_most_n_updates_are_crossed(limit: int) -> None:
    policy = multi_version(limit)
    for crossed in range(limit + 3):
        view = FlowView(batch_groups=1, version=10, batch_taken=False, in_flight={}, ready={10 - crossed: 1})
        assert policy.may_take(view, {10 - crossed: 1}) == (crossed <= limit)


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_F02_one_publish_moves_each_unfinished_rollout_by_exactly_one(limit: int) -> None:
    flow = flow_of(multi_version(limit), batch_groups=2, group_size=2)
    straggler, *others = tickets(flow)
    crossed = []
    while True:
        for ticket in others:
            store(flow, ticket)
        lease = take(flow)
        if lease is None:
            break
        flow.trained(lease.lease)
        others = tickets(flow)
        if not flow.may_publish():
            break
        publish(flow)
        crossed.append(flow.view().version - straggler.version)
        others += tickets(flow)
    assert crossed == list(range(1, limit)), "the last one waits for the straggler"
    store(flow, straggler)
    if flow.may_publish():
        publish(flow)
    lease = take(flow)
    assert lease is not None
    assert straggler.group in lease.groups
    assert lease.version - straggler.version <= limit


def test_F03_versions_strictly_rise_and_negative_staleness_is_an_error() -> None:
    flow = flow_of(multi_version(2), batch_groups=1, version=7, first_group=50)
    first, second = tickets(flow)
    store(flow, first)
    with pytest.raises(StalenessError, match="staleness would be negative"):
        flow.stored(second.trajectories[0], version=8, tokens=1, nbytes=1)
    lease = take(flow)
    assert lease is not None
    flow.trained(lease.lease)
    for version in (0, 6, 7, 9):
        with pytest.raises(StalenessError, match="versions rise by exactly one"):
            flow.published(version)
    assert publish(flow) == 8
    with pytest.raises(StalenessError, match="continue from the highest version ever published"):
        flow.join("left-over", slots=1, live_versions=1, versions=(9,))


def test_F05_slow_prompts_are_trained_as_often_as_they_are_sampled() -> None:
    ticks, slots = 5000, 16
    flow = flow_of(multi_version(1), batch_groups=8, slots=slots)
    random = np.random.default_rng(0)
    slow_prompt = random.permutation(np.arange(100) % 2 == 0)
    running: list[tuple[int, int]] = []
    versions: dict[int, int] = {}
    trained: list[int] = []
    for tick in range(ticks):
        for ticket in tickets(flow):
            versions[ticket.group] = ticket.version
            heapq.heappush(running, (tick + (10 if slow_prompt[ticket.group % 100] else 1), ticket.group))
        while running and running[0][0] <= tick + 1:
            _, group = heapq.heappop(running)
            assert flow.stored(group, version=versions[group], tokens=1, nbytes=1)
        lease = take(flow)
        if lease is not None:
            assert all(lease.version - versions[group] <= 1 for group in lease.groups)
            trained += flow.trained(lease.lease)
        if flow.may_publish():
            publish(flow)
    assert len(trained) > 1500
    assert np.mean(slow_prompt[np.array(trained) % 100]) == pytest.approx(0.5, abs=0.02)
    assert flow.counts().dropped == {}
    assert flow.counts().refused == {}


def test_F05_in_lockstep_trained_order_is_submission_order() -> None:
    flow = flow_of(Synchronous(Synchronous.Settings()), batch_groups=3, group_size=2)
    trained: list[int] = []
    for _ in range(4):
        for ticket in reversed(tickets(flow)):
            store(flow, ticket)
        trained += train_and_publish(flow).rows
    assert trained == list(range(24))


@pytest.mark.parametrize(
    "policy", [Synchronous(Synchronous.Settings()), multi_version(0)], ids=["synchronous", "multi_version"]
)
def test_F06_a_limit_of_zero_runs_and_equals_the_synchronous_trainer(policy: MultiVersion | Synchronous) -> None:
    flow = flow_of(policy, batch_groups=3, group_size=2)
    for version in range(5):
        batch = tickets(flow)
        assert [ticket.group for ticket in batch] == [3 * version, 3 * version + 1, 3 * version + 2]
        assert {ticket.version for ticket in batch} == {version}
        assert take(flow) is None
        for ticket in batch:
            store(flow, ticket)
        lease = take(flow)
        assert lease is not None
        assert (lease.version, lease.rows) == (version, tuple(range(6 * version, 6 * version + 6)))
        assert tickets(flow) == [], "nothing starts before the next version is published"
        flow.trained(lease.lease)
        assert tickets(flow) == []
        publish(flow)


@pytest.mark.parametrize("order", ["stream", "longest_first"])
def test_F08_a_window_of_two_updates_keeps_three_versions_and_trains_the_oldest_first(order: str) -> None:
    """Freshest first is no option: what it leaves would grow too old. In which order groups start is one, and changes
    nothing about that."""
    flow = Flow(
        policy=Windowed(Windowed.Settings(max_staleness=2)),
        batch_groups=3,
        group_size=1,
        version=8,
        prompt=(lambda group: group % 4) if order == "longest_first" else None,
    )
    flow.join("a", slots=10_000, live_versions=8, versions=(8,))
    began: dict[int, int] = {}
    while flow.view().version < 10:
        for ticket in tickets(flow):
            began[ticket.group] = ticket.version
            store(flow, ticket)
        train_and_publish(flow)
    for ticket in reversed(tickets(flow)):
        began[ticket.group] = ticket.version
        store(flow, ticket)
    assert flow.view().ready == {8: 3, 9: 3, 10: 3}
    assert [began[group] for _ in range(3) for group in train_and_publish(flow).groups] == 3 * [8] + 3 * [9] + 3 * [10]


def test_F08_what_is_older_and_still_runs_is_waited_for_and_what_is_newer_is_not() -> None:
    flow = flow_of(Windowed(Windowed.Settings(max_staleness=2)), batch_groups=3, version=8)
    running: dict[int, Ticket] = {}
    for version in (8, 9, 10):
        *others, running[version] = tickets(flow)
        for ticket in others:
            store(flow, ticket)
        if version < 10:
            assert {group // 3 for group in train_and_publish(flow).groups} == {version - 8}
    for version in (8, 9, 10):
        assert flow.view().in_flight == {left: 1 for left in running if left >= version}
        assert flow.view().ready == {left: 2 for left in running if left >= version}
        assert take(flow) is None, "what would fill the batch is newer than what still runs"
        store(flow, running[version])
        assert running[version].group in train_and_publish(flow).groups


def test_F08_nothing_falls_out_of_the_window_because_it_waits_for_what_would() -> None:
    flow = flow_of(multi_version(2), batch_groups=3, version=8)
    late, *others = tickets(flow)
    for ticket in others:
        store(flow, ticket)
    train_and_publish(flow)
    for ticket in tickets(flow):
        store(flow, ticket)
    lease = take(flow)
    assert lease is not None
    flow.trained(lease.lease)
    assert not flow.may_publish(), "version 10 would leave 8 behind, and the next batch after that too old"
    store(flow, late)
    assert publish(flow) == 10
    for ticket in tickets(flow):
        store(flow, ticket)
    assert late.group in train_and_publish(flow).groups
    assert flow.counts().dropped == {}


def test_F09_the_bound_on_what_is_prepared_ahead_is_a_sliding_window() -> None:
    flow = flow_of(multi_version(3, 2), batch_groups=4, group_size=2)
    for ticket in (prepared := tickets(flow)):
        store(flow, ticket)
    assert len(prepared) == 2 * 4
    assert tickets(flow) == [], "the trainer stands still, and so does the producer, after two batches"
    for _ in range(5):
        lease = take(flow)
        assert lease is not None
        more = tickets(flow)
        assert len(more) == 4, "each batch that is taken allows one more"
        for ticket in more:
            store(flow, ticket)
        assert tickets(flow) == []
        flow.trained(lease.lease)
        publish(flow)
        assert tickets(flow) == []


def test_J01_surplus_stays_and_everything_dispatched_is_accounted_for() -> None:
    flow = flow_of(multi_version(3, 3), batch_groups=2, group_size=3)
    first = tickets(flow)
    assert len(first) == 6
    for ticket in first[:5]:
        store(flow, ticket)
    lease = take(flow)
    assert lease is not None
    assert flow.trained(lease.lease) == tuple(range(6))
    counts = flow.counts()
    assert (counts.dispatched, counts.trained, counts.buffered, counts.in_flight) == (18, 6, 9, 3)
    publish(flow)
    assert flow.drop_group(first[4].group, "failed") == (12, 13, 14)
    store(flow, first[5])
    lease = train_and_publish(flow)
    assert lease.groups == (2, 3), "the surplus of the first batch, in order"
    counts = flow.counts()
    assert counts.dispatched == counts.trained + counts.buffered + counts.in_flight + counts.dropped["failed"]
    assert (counts.trained, counts.buffered, counts.dropped) == (12, 3, {"failed": 3})


def test_J07_late_writes_of_a_failed_group_are_refused_and_counted() -> None:
    flow = flow_of(multi_version(1), batch_groups=1, group_size=3)
    (ticket,) = tickets(flow)
    stored, failed, late = ticket.trajectories
    storage = {stored}
    assert flow.stored(stored, version=0, tokens=1, nbytes=10)
    assert flow.knows(ticket.group)
    assert take(flow) is None, "a group with an unfinished member is no row of any batch"
    storage -= set(flow.drop_group(ticket.group, f"trajectory {failed} failed"))
    assert not flow.stored(late, version=0, tokens=1, nbytes=10), "the caller does not keep what is refused"
    assert storage == set()
    assert flow.nbytes == 0
    assert flow.counts().refused == {"late": 1}
    (replacement,) = tickets(flow)
    store(flow, replacement)
    lease = take(flow)
    assert lease is not None
    assert lease.groups == (replacement.group,)


def test_L02_prompts_samples_optimiser_steps_and_versions_keep_a_fixed_relation() -> None:
    flow = flow_of(Synchronous(Synchronous.Settings()), batch_groups=8, group_size=4)
    prompts = samples = batches = optimiser_steps = 0
    while prompts < 64:
        for ticket in tickets(flow):
            prompts += 1
            store(flow, ticket)
        lease = take(flow)
        assert lease is not None
        parts = mini_batches(np.array(lease.rows) // 4, count=2)
        assert [len(part) for part in parts] == [16, 16]
        optimiser_steps += len(parts)
        samples += len(flow.trained(lease.lease))
        batches += 1
        publish(flow)
    assert (prompts, samples, batches, optimiser_steps) == (64, 256, 8, 16)
    assert flow.view().version == 8
