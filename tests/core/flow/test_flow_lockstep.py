"""Lockstep: who gets what follows ids, whatever comes and goes; and phases in which nothing is rolled out."""

from __future__ import annotations

import pytest

from headrace.flow import Flow
from headrace_staleness.synchronous import Synchronous
from support.flow_steps import advance, carry_out, store, ticket


def lockstep(*, batch_groups: int = 4, group_size: int = 2) -> Flow:
    policy = Synchronous(Synchronous.Settings())
    return Flow(policy=policy, batch_groups=batch_groups, group_size=group_size)


def test_lockstep_deals_by_id_over_the_instances_by_name() -> None:
    flow = lockstep(batch_groups=3, group_size=3)
    for name in ("b", "a"):
        flow.join(name, slots=1, live_versions=1, versions=(0,))
    tickets = [ticket(flow) for _ in range(3)]
    assert flow.next_ticket() is None
    placed = {t: name for found in tickets for t, name in zip(found.trajectories, found.instances, strict=True)}
    assert placed == {t: "ab"[t % 2] for t in range(9)}
    assert all(found.cohort == 0 for found in tickets)
    assert all(found.cohort_sizes == {"a": 5, "b": 4} for found in tickets)


def test_a_cohort_begins_when_every_instance_hosts_the_version() -> None:
    flow = lockstep(batch_groups=1)
    flow.join("a", slots=1, live_versions=1, versions=(0,))
    flow.join("b", slots=1, live_versions=1, versions=())
    assert flow.next_ticket() is None
    flow.committed("b", 0)
    assert ticket(flow).instances == ("a", "b")
    advance(flow, (0,), version=0)
    assert flow.next_ticket() is None
    carry_out(flow)
    assert ticket(flow).cohort == 1


def test_inside_a_cohort_the_remaining_instances_get_exactly_their_share() -> None:
    flow = lockstep(batch_groups=4, group_size=3)
    for name in ("a", "b", "c"):
        flow.join(name, slots=1, live_versions=1, versions=(0,))
    first = ticket(flow)
    assert flow.leave("b") == (1,)
    flow.join("b", slots=1, live_versions=1, versions=(0,))
    flow.join("d", slots=1, live_versions=1, versions=(0,))
    rest = [ticket(flow) for _ in range(3)]
    assert all(found.cohort == 0 and found.cohort_sizes == first.cohort_sizes for found in rest)
    assert all(found.instances == ("a", "", "c") for found in rest), "the new b is not the one of the cohort"
    assert flow.unplaced() == (1, 4, 7, 10)
    assert [flow.place_again(t) for t in flow.unplaced()] == ["b", "a", "d", "c"], "by id over a b c d"


def test_an_instance_that_left_idle_and_joined_again_is_outside_the_cohort() -> None:
    flow = lockstep(batch_groups=2, group_size=2)
    for name in ("a", "b"):
        flow.join(name, slots=1, live_versions=1, versions=(0,))
    ticket(flow)
    flow.generated(1)
    assert flow.leave("b") == ()
    flow.join("b", slots=1, live_versions=1, versions=(0,))
    assert ticket(flow).instances == ("a", "")
    assert flow.place_again(3) == "b"


def test_the_share_of_a_lost_instance_waits_for_another_one() -> None:
    flow = lockstep(batch_groups=2, group_size=1)
    flow.join("a", slots=1, live_versions=1, versions=(0,))
    ticket(flow)
    flow.leave("a")
    assert flow.next_ticket() is None
    flow.join("b", slots=1, live_versions=1, versions=())
    assert flow.place_again(0) is None
    carry_out(flow)
    assert flow.place_again(0) == "b"
    assert ticket(flow).instances == ("",)
    assert flow.place_again(1) == "b"


def test_what_replaces_dropped_groups_is_a_cohort_of_its_own_once_nothing_is_in_flight() -> None:
    flow = lockstep(batch_groups=3, group_size=2)
    for name in ("a", "b"):
        flow.join(name, slots=1, live_versions=1, versions=(0,))
    for _ in range(3):
        ticket(flow)
    flow.drop_group(0, "failed")
    store(flow, 1, version=0)
    assert flow.next_ticket() is None  # group 2 is being decoded: whatever joined it would depend on when
    flow.drop_group(2, "failed")
    fourth, fifth = ticket(flow), ticket(flow)
    assert (fourth.group, fourth.cohort, dict(fourth.cohort_sizes)) == (3, 3, {"a": 2, "b": 2})
    assert (fifth.group, fifth.cohort, fifth.instances) == (4, 3, ("a", "b"))
    assert flow.next_ticket() is None


def test_a_skipped_batch_is_followed_by_another_cohort_of_the_same_version() -> None:
    flow = lockstep(batch_groups=1, group_size=2)
    flow.join("a", slots=1, live_versions=1, versions=(0,))
    ticket(flow)
    store(flow, 0, version=0)
    lease = flow.take_batch(now=0.0, ttl=1.0)
    assert lease is not None
    flow.trained(lease.lease, applied=False)
    assert not flow.may_publish()
    again = ticket(flow)
    assert (again.group, again.version, again.cohort) == (1, 0, 1)


def test_without_rollout_nothing_is_placed() -> None:
    flow = Flow(policy=Synchronous(Synchronous.Settings()), batch_groups=2, group_size=2, rollout=False, version=3)
    found = ticket(flow)
    assert (found.instances, found.cohort, dict(found.cohort_sizes)) == (("", ""), None, {})
    assert flow.unplaced() == ()
    ticket(flow)
    assert flow.next_ticket() is None
    for group in (0, 1):
        store(flow, group, version=3)
    assert flow.take_batch(now=0.0, ttl=1.0) is not None
    with pytest.raises(ValueError, match="never placed"):
        flow.place_again(0)
