"""An instance that drains finishes what it has, gets nothing new, and may leave without a loss."""

from __future__ import annotations

import pytest

from headrace.flow import Flow
from headrace.flow.fleet import Fleet
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous
from support.flow_steps import advance, carry_out, store, ticket


def free_running(*names: str, versions: int = 1, migrates: bool = False, batch_groups: int = 2) -> Flow:
    """One trajectory makes a group."""
    policy = MultiVersion(MultiVersion.Settings(max_staleness=3))
    flow = Flow(policy=policy, batch_groups=batch_groups, group_size=1)
    for name in names:
        flow.join(name, slots=4, live_versions=versions, versions=(0,), migrates=migrates)
    return flow


def test_it_gets_no_new_groups_and_leaves_when_what_it_has_is_done() -> None:
    flow = free_running("a", "b", batch_groups=8)
    tickets = [ticket(flow) for _ in range(4)]
    on_b = [t.group for t in tickets if t.instances == ("b",)]
    flow.drain("b")
    assert [ticket(flow).instances for _ in range(3)] == [("a",)] * 3
    assert flow.next_ticket() is None, "there is no room elsewhere"
    assert flow.drained() == ()
    for group in on_b:
        assert flow.drained() == ()
        store(flow, group, version=0)
    assert flow.drained() == ("b",)
    assert flow.leave("b") == ()


def test_draining_twice_is_draining_once_and_an_unknown_one_is_refused() -> None:
    flow = free_running("a", "b")
    flow.drain("b")
    flow.drain("b")
    assert flow.drained() == ("b",)
    with pytest.raises(ValueError, match="no instance 'c'; instances: a, b"):
        flow.drain("c")


def test_it_takes_up_no_version_and_keeps_no_version_that_nobody_needs() -> None:
    flow = free_running("a", "b", versions=2)
    first, second = ticket(flow), ticket(flow)
    flow.drain("b")
    advance(flow, (first.group, second.group), version=0)
    assert [(s.instance, s.load, s.retire) for s in flow.switches()] == [("a", 1, (0,)), ("b", None, (0,))]


def test_a_pinned_version_keeps_it_until_the_pin_is_gone() -> None:
    flow = free_running("a", "b")
    flow.pin(0)
    flow.drain("b")
    assert flow.drained() == ()
    flow.unpin(0)
    assert flow.drained() == ("b",)


def test_what_a_lost_instance_leaves_goes_to_it_only_where_nobody_else_can_take_it() -> None:
    flow = free_running("a", "b", "c")
    lost = next(t for t in (ticket(flow) for _ in range(3)) if t.instances == ("c",))
    flow.drain("b")
    flow.leave("c")
    assert flow.place_again(lost.trajectories[0]) == "a"
    flow.leave("a")
    assert flow.place_again(lost.trajectories[0]) == "b"


def test_it_stays_while_an_unplaced_trajectory_waits_for_its_version() -> None:
    flow = free_running("a", "b")
    started = ticket(flow)
    flow.drain("b")
    assert flow.leave("a") == started.trajectories
    assert flow.drained() == ()
    assert flow.place_again(started.trajectories[0]) == "b"
    store(flow, started.group, version=0)
    assert flow.drained() == ("b",)


def test_it_is_taken_last_where_only_barred_instances_are_left() -> None:
    fleet = Fleet(lookahead=1.25)
    for name in ("a", "b"):
        fleet.join(name, slots=4, live_versions=1, versions=(0,))
    busy, idle = fleet.instances
    fleet.place(0, 0, busy)
    fleet.bar({busy})
    fleet.drain("b")
    assert fleet.room(0) is None
    assert fleet.room_again(0) is busy
    fleet.leave("a")
    assert fleet.room_again(0) is idle


def test_it_brings_no_lost_version_back_although_it_has_room() -> None:
    flow = free_running("c")
    groups = [ticket(flow).group for _ in range(3)]
    advance(flow, (groups[0], groups[1]), version=0)
    flow.join("a", slots=4, live_versions=1, versions=(1,))
    flow.join("b", slots=4, live_versions=2, versions=(1,))
    flow.drain("b")
    assert flow.leave("c") == (groups[2],)
    assert [(s.instance, s.load, s.retire) for s in flow.switches()] == [("a", 0, (1,))]


@pytest.mark.parametrize("migrates", [True, False])
def test_it_hands_over_what_it_has_where_that_costs_nothing(migrates: bool) -> None:
    flow = free_running("a", "b", migrates=migrates)
    tickets = [ticket(flow) for _ in range(4)]
    flow.drain("b")
    moves = flow.moves()
    assert [(move.source, move.target, move.with_state) for move in moves] == [("b", "a", True)] * 2 * migrates
    for move in moves:
        assert flow.moved(move.trajectory)
    assert flow.drained() == ("b",) * migrates
    assert len(tickets) == 4


def test_what_is_on_its_way_to_it_still_comes_and_it_does_not_leave_before() -> None:
    flow = free_running("a", "b", migrates=True)
    for _ in range(2):
        ticket(flow)
    flow.drain("a")
    (move,) = flow.moves()
    assert (move.source, move.target) == ("a", "b")
    flow.drain("b")
    flow.generated(1 - move.trajectory)
    assert flow.moves() == (move,)
    assert flow.drained() == ()
    assert flow.moved(move.trajectory)
    assert flow.instance_of(move.trajectory) == "b"
    assert flow.drained() == ("a",)
    flow.generated(move.trajectory)
    assert flow.drained() == ("a", "b")


# ---------------------------------------------------------------- lockstep


def lockstep() -> Flow:
    flow = Flow(policy=Synchronous(Synchronous.Settings()), batch_groups=4, group_size=1)
    for name in ("a", "b"):
        flow.join(name, slots=4, live_versions=1, versions=(0,))
    return flow


def test_in_lockstep_it_gets_its_share_of_the_cohort_that_has_begun_and_none_of_the_next() -> None:
    flow = lockstep()
    first = ticket(flow)
    flow.drain("b")
    assert flow.drained() == (), "its share of the cohort is still to come"
    tickets = [first, *(ticket(flow) for _ in range(3))]
    assert [t.instances for t in tickets] == [("a",), ("b",)] * 2
    advance(flow, (0, 1, 2, 3), version=0)
    assert flow.drained() == ("b",)
    carry_out(flow)
    assert ticket(flow).cohort_sizes == {"a": 4}, "before it has left"


def test_in_lockstep_one_that_drains_holds_the_next_cohort_up_for_nobody() -> None:
    flow = lockstep()
    flow.drain("b")
    assert ticket(flow).cohort_sizes == {"a": 4}
    assert flow.drained() == ("b",)
