"""Rules of the façade that are clearer in the small than under random interleavings."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from headrace.contract import FlowView
from headrace.errors import StalenessError
from headrace.flow import BatchLease, Flow, FlowColumns
from headrace.flow.group_table import DUPLICATE, UNKNOWN
from headrace_staleness.multi_version import MultiVersion


def flow_of(*, batch_groups: int = 2, group_size: int = 1, max_staleness: int = 1, slots: int = 100) -> Flow:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=max_staleness))
    flow = Flow(policy=policy, batch_groups=batch_groups, group_size=group_size)
    flow.join("a", slots=slots, live_versions=max_staleness + 1, versions=(0,))
    return flow


def start(flow: Flow) -> int:
    ticket = flow.next_ticket()
    assert ticket is not None
    return ticket.group


def store(flow: Flow, group: int, *, version: int = 0) -> None:
    for trajectory in range(group * flow.group_size, (group + 1) * flow.group_size):
        assert flow.stored(trajectory, version=version, tokens=3 + trajectory, nbytes=10)


def take(flow: Flow) -> BatchLease:
    lease = flow.take_batch(now=100.0, ttl=5.0)
    assert lease is not None
    return lease


def test_settings_that_cannot_work_are_refused_when_the_flow_is_made() -> None:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=1, outstanding_batches=2))
    with pytest.raises(StalenessError, match="outstanding_batches"):
        Flow(policy=policy, batch_groups=2, group_size=1)
    good = MultiVersion(MultiVersion.Settings(max_staleness=1))
    for wrong in ({"batch_groups": 0, "group_size": 1}, {"batch_groups": 1, "group_size": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Flow(policy=good, **wrong)
    with pytest.raises(ValueError, match="lookahead"):
        Flow(policy=good, batch_groups=1, group_size=1, lookahead=0.0)
    with pytest.raises(ValueError, match="policy version"):
        Flow(policy=good, batch_groups=1, group_size=1, version=-1)


def test_a_batch_names_its_groups_rows_and_tokens_in_id_order() -> None:
    flow = flow_of(group_size=2)
    for group in (start(flow), start(flow)):
        store(flow, group)
    assert take(flow) == BatchLease(
        lease=0, version=0, groups=(0, 1), rows=(0, 1, 2, 3), tokens=(3, 4, 5, 6), deadline=105.0
    )
    assert flow.take_batch(now=100.0, ttl=5.0) is None, "the batch of a version is taken once"


def test_a_batch_that_comes_back_is_taken_again_at_the_same_version() -> None:
    flow = flow_of()
    for group in (start(flow), start(flow)):
        store(flow, group)
    first = take(flow)
    assert flow.expire(104.9) == ()
    assert [expired.lease for expired in flow.expire(105.0)] == [first.lease]
    again = take(flow)
    assert (again.version, again.rows) == (first.version, first.rows)
    with pytest.raises(ValueError, match="lease 0 is not held"):
        flow.trained(first.lease)
    assert flow.trained(again.lease) == again.rows
    assert flow.counts().trained == 2


def test_only_a_trained_batch_lets_the_next_version_follow() -> None:
    flow = flow_of()
    for group in (start(flow), start(flow)):
        store(flow, group)
    with pytest.raises(StalenessError, match="its batch is not trained"):
        flow.published(1)
    lease = take(flow)
    assert not flow.may_publish()
    flow.trained(lease.lease)
    assert flow.may_publish()
    for wrong in (0, 2):
        with pytest.raises(StalenessError, match="versions rise by exactly one"):
            flow.published(wrong)
    flow.published(1)
    assert not flow.may_publish()


def test_the_window_waits_for_the_oldest_version_in_flight() -> None:
    flow = flow_of()
    for group in (start(flow), start(flow)):
        store(flow, group)
    lease = take(flow)
    straggler = start(flow)
    flow.trained(lease.lease)
    assert not flow.may_publish()
    with pytest.raises(StalenessError, match="older trajectories are in flight"):
        flow.published(1)
    store(flow, straggler)
    assert flow.may_publish()


def test_a_version_that_may_be_published_is_not_held_up_by_new_groups() -> None:
    flow = flow_of()
    for group in (start(flow), start(flow)):
        store(flow, group)
    flow.trained(take(flow).lease)
    assert flow.may_publish()
    assert flow.next_ticket() is None, "under K = 1 it would take may_publish back"
    flow.published(1)
    flow.committed("a", 1)
    assert start(flow) == 2


def test_a_wider_window_keeps_starting_groups_while_a_version_is_published() -> None:
    flow = flow_of(max_staleness=2)
    for group in (start(flow), start(flow)):
        store(flow, group)
    flow.trained(take(flow).lease)
    assert flow.may_publish()
    assert flow.next_ticket() is not None
    assert flow.may_publish()


def test_dropping_a_group_gives_its_places_and_its_share_of_admission_back() -> None:
    flow = flow_of(batch_groups=1, group_size=2, slots=2)
    group = start(flow)
    assert flow.next_ticket() is None
    assert flow.stored(0, version=0, tokens=1, nbytes=10)
    assert flow.drop_group(group, "timed out") == (0, 1)
    assert (flow.nbytes, flow.instance_of(1), flow.knows(group)) == (0, "", False)
    assert flow.drop_group(group, "timed out") == ()
    assert flow.counts().dropped == {"timed out": 2}
    assert start(flow) == 1
    with pytest.raises(ValueError, match="never dispatched; the next one is 2"):
        flow.drop_group(2, "timed out")


def test_ending_a_phase_drops_everything_outstanding() -> None:
    flow = flow_of(max_staleness=2)
    groups = [start(flow) for _ in range(4)]
    for group in groups[:3]:
        store(flow, group)
    lease = take(flow)
    assert flow.drop_all("phase_ended") == tuple(groups)
    counts = flow.counts()
    assert (counts.in_flight, counts.buffered, counts.dropped) == (0, 0, {"phase_ended": 4})
    assert flow.unplaced() == ()
    with pytest.raises(ValueError, match="not held"):
        flow.trained(lease.lease)
    assert not flow.stored(3, version=0, tokens=1, nbytes=1)
    assert flow.counts().refused == {"late": 1}


def test_a_row_may_be_younger_than_its_group_and_the_group_is_as_old_as_its_oldest_row() -> None:
    flow = flow_of(batch_groups=1, group_size=2, max_staleness=2)
    store(flow, start(flow))
    second = start(flow)
    flow.trained(take(flow).lease)
    flow.published(1)
    assert flow.stored(2, version=1, tokens=1, nbytes=1)
    with pytest.raises(StalenessError, match="newest published version is 1"):
        flow.stored(3, version=2, tokens=1, nbytes=1)
    assert flow.stored(3, version=1, tokens=1, nbytes=1)
    assert flow.view().ready == {1: 1}
    assert flow.view().in_flight == {}
    assert take(flow).groups == (second,)


def test_a_row_older_than_its_group_is_an_error() -> None:
    flow = Flow(policy=MultiVersion(MultiVersion.Settings(max_staleness=1)), batch_groups=1, group_size=1, version=4)
    flow.join("a", slots=1, live_versions=1, versions=(4,))
    start(flow)
    with pytest.raises(StalenessError, match="has a token of version 3, its group started under 4"):
        flow.stored(0, version=3, tokens=1, nbytes=1)


def test_a_version_is_live_while_something_needs_it() -> None:
    flow = flow_of(batch_groups=1, max_staleness=2)
    store(flow, start(flow))
    straggler = start(flow)
    flow.pin(0)
    flow.trained(take(flow).lease)
    flow.published(1)
    assert (flow.live_versions(), flow.retirable()) == ((0, 1), ())
    flow.unpin(0)
    assert flow.retirable() == ()
    with pytest.raises(ValueError, match="version 0 is not retirable"):
        flow.retired(0)
    store(flow, straggler)
    assert flow.retirable() == (0,)
    flow.retired(0)
    assert flow.live_versions() == (1,)
    with pytest.raises(ValueError, match="version 0 is not live; live: "):
        flow.pin(0)
    with pytest.raises(ValueError, match="version 1 is not pinned"):
        flow.unpin(1)


class _Careless(MultiVersion):
    def admit(self, view: FlowView) -> int:
        return 1

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        return True

    def may_publish(self, view: FlowView) -> bool:
        return True


def test_a_policy_that_lets_too_old_rows_through_is_caught() -> None:
    flow = Flow(policy=_Careless(_Careless.Settings(max_staleness=1)), batch_groups=1, group_size=1)
    flow.join("a", slots=100, live_versions=3, versions=(0,))
    straggler = start(flow)
    for version in (0, 1):
        store(flow, start(flow), version=version)
        flow.trained(take(flow).lease)
        flow.published(version + 1)
        flow.committed("a", version + 1)
    store(flow, straggler)
    with pytest.raises(StalenessError, match="staleness 2 is outside 0 … 1") as caught:
        take(flow)
    assert caught.value.origin == "staleness policy _Careless"


def test_a_group_is_in_flight_until_its_last_column_is_there_and_only_then_ready() -> None:
    columns = FlowColumns(all=("tokens", "reference"), first=("tokens",), consumers={"train": ("tokens", "reference")})
    policy = MultiVersion(MultiVersion.Settings(max_staleness=1))
    flow = Flow(policy=policy, batch_groups=1, group_size=2, columns=columns)
    flow.join("a", slots=100, live_versions=2, versions=(0,))
    store(flow, start(flow))
    assert (flow.view().in_flight, flow.view().ready) == ({0: 1}, {})
    assert (flow.counts().in_flight, flow.counts().buffered) == (0, 2)
    rows, nbytes = np.array([0, 1, 7]), np.array([4, 4, 4])
    assert flow.added(rows[:1], ("reference",), nbytes=nbytes[:1], unit=1).tolist() == [0]
    assert flow.take_batch(now=0.0, ttl=1.0) is None
    assert flow.added(rows, ("reference",), nbytes=nbytes, unit=1).tolist() == [DUPLICATE, 0, UNKNOWN]
    assert (flow.view().in_flight, flow.view().ready) == ({}, {0: 1})
    assert take(flow).groups == (0,)
