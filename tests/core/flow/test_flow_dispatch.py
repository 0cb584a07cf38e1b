"""Where trajectories go, which versions instances load, and what happens when instances come and go."""

from __future__ import annotations

from collections import Counter

import pytest

from headrace.errors import StalenessError
from headrace.flow import Flow, Switch
from headrace_staleness.multi_version import MultiVersion
from support.flow_steps import advance, carry_out, store, ticket


def free_running(*, batch_groups: int = 4, group_size: int = 2, max_staleness: int = 2) -> Flow:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=max_staleness))
    return Flow(policy=policy, batch_groups=batch_groups, group_size=group_size)


# ---------------------------------------------------------------- free-running


def test_each_member_goes_to_the_least_loaded_instance_by_load_per_slot_then_by_name() -> None:
    flow = free_running(group_size=3)
    flow.join("b", slots=2, live_versions=2, versions=(0,))
    flow.join("a", slots=4, live_versions=2, versions=(0,))
    assert ticket(flow).instances == ("a", "b", "a")  # 0, 0 → ¼, 0 → ¼, ½
    assert ticket(flow).instances == ("a", "b", "a")  # ½, ½ → ¾, ½ → ¾, 1


def test_an_instance_is_given_no_more_than_its_slots_and_the_lookahead() -> None:
    flow = free_running(group_size=1, batch_groups=32)
    flow.join("a", slots=8, live_versions=2, versions=(0,))
    given = 0
    while flow.next_ticket() is not None:
        given += 1
    assert given == 10


def test_a_group_is_not_put_on_an_instance_that_was_full_when_it_started() -> None:
    flow = free_running(group_size=3, batch_groups=8)
    flow.join("large", slots=4, live_versions=1, versions=(0,))
    flow.join("small", slots=1, live_versions=1, versions=())
    first, second = ticket(flow), ticket(flow)
    assert {*first.instances, *second.instances} == {"large"}
    assert flow.next_ticket() is None
    flow.committed("small", 0)
    assert ticket(flow).instances == ("small",) * 3


def test_only_instances_that_host_the_newest_version_get_new_groups() -> None:
    flow = free_running()
    assert flow.next_ticket() is None
    flow.join("a", slots=8, live_versions=2, versions=())
    assert flow.next_ticket() is None
    flow.committed("a", 0)
    assert ticket(flow).instances == ("a", "a")


def test_a_place_is_free_when_the_tokens_are_done_and_before_the_trajectory_is_scored() -> None:
    flow = free_running(group_size=1, batch_groups=8)
    flow.join("a", slots=1, live_versions=1, versions=(0,))
    first, _ = ticket(flow), ticket(flow)
    assert flow.next_ticket() is None
    assert flow.instance_of(first.trajectories[0]) == "a"
    flow.generated(first.trajectories[0])
    assert flow.instance_of(first.trajectories[0]) == ""
    assert flow.next_ticket() is not None


def test_a_trajectory_whose_instance_left_is_placed_again_under_its_version() -> None:
    flow = free_running(group_size=2)
    for name in ("a", "b"):
        flow.join(name, slots=4, live_versions=3, versions=(0,))
    ticket(flow)
    assert flow.leave("a") == (0,)
    assert flow.unplaced() == (0,)
    assert flow.place_again(0) == "b"
    assert flow.unplaced() == ()


def test_without_room_a_trajectory_stays_unplaced() -> None:
    flow = free_running(group_size=2)
    for name in ("a", "b"):
        flow.join(name, slots=1, live_versions=1, versions=(0,))
    ticket(flow), ticket(flow)
    displaced = flow.leave("a")
    assert displaced == (0, 2)
    assert flow.place_again(0) is None
    assert flow.unplaced() == (0, 2)
    flow.generated(1), flow.generated(3)
    assert [flow.place_again(t) for t in flow.unplaced()] == ["b", "b"]


def test_an_instance_must_leave_before_it_joins_again() -> None:
    flow = free_running()
    flow.join("a", slots=1, live_versions=1, versions=(0,))
    with pytest.raises(ValueError, match="must leave before it joins again"):
        flow.join("a", slots=1, live_versions=1, versions=(0,))
    flow.leave("a")
    flow.join("a", slots=1, live_versions=1, versions=())
    with pytest.raises(ValueError, match="no instance 'b'; instances: a"):
        flow.leave("b")


def test_an_instance_cannot_serve_a_version_that_was_never_published() -> None:
    flow = free_running()
    with pytest.raises(StalenessError, match="staleness would be negative"):
        flow.join("a", slots=1, live_versions=1, versions=(1,))
    flow.join("a", slots=1, live_versions=1, versions=())
    with pytest.raises(StalenessError, match="instance 'a' reports version 3"):
        flow.committed("a", 3)


def test_an_instance_cannot_host_more_versions_than_it_said() -> None:
    flow = Flow(policy=MultiVersion(MultiVersion.Settings(max_staleness=2)), batch_groups=1, group_size=1, version=5)
    with pytest.raises(ValueError, match="cannot host"):
        flow.join("a", slots=1, live_versions=1, versions=(3, 4))
    flow.join("a", slots=1, live_versions=2, versions=(3, 4))
    with pytest.raises(ValueError, match=r"beside \[3, 4\]"):
        flow.committed("a", 5)


# ---------------------------------------------------------------- which versions instances load


def test_an_instance_with_room_loads_the_newest_version_at_once() -> None:
    flow = free_running(batch_groups=1)
    flow.join("a", slots=4, live_versions=2, versions=(0,))
    flow.join("b", slots=4, live_versions=2, versions=())
    assert flow.switches() == (Switch(instance="b", load=0, retire=()),)
    flow.committed("b", 0)
    assert flow.switches() == ()
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    assert flow.switches() == (
        Switch(instance="a", load=1, retire=()),
        Switch(instance="b", load=1, retire=()),
    )


def test_a_version_nobody_needs_is_retired_and_a_full_instance_gives_up_an_idle_one() -> None:
    flow = free_running(batch_groups=1, group_size=2)
    for name in ("a", "b"):
        flow.join(name, slots=4, live_versions=1, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    assert flow.switches() == (), "both still work on version 0"
    flow.generated(2)
    assert flow.switches() == (Switch(instance="a", load=1, retire=(0,)),)
    flow.generated(3)
    assert [switch.instance for switch in flow.switches()] == ["a", "b"], "all idle ones switch"
    carry_out(flow)
    assert (flow.hosting(0), flow.hosting(1)) == ((), ("a", "b"))


def test_a_switch_is_repeated_until_it_was_carried_out() -> None:
    flow = free_running(batch_groups=1)
    flow.join("a", slots=4, live_versions=1, versions=(0,))
    ticket(flow)
    advance(flow, (0,), version=0)
    wanted = (Switch(instance="a", load=1, retire=(0,)),)
    assert flow.switches() == flow.switches() == wanted
    flow.retired_on("a", 0)
    assert flow.switches() == (Switch(instance="a", load=1, retire=()),)
    flow.committed("a", 1)
    assert flow.switches() == ()


def test_committing_a_version_replaces_the_only_one_of_a_single_version_instance() -> None:
    flow = free_running(batch_groups=1)
    flow.join("a", slots=4, live_versions=1, versions=(0,))
    ticket(flow)
    advance(flow, (0,), version=0)
    assert flow.committed("a", 1) == ()
    assert (flow.hosting(0), flow.hosting(1)) == ((), ("a",))
    assert flow.retired_on("a", 0) == (), "saying so afterwards changes nothing"


def test_trajectories_that_lose_their_version_are_named_and_their_version_comes_back() -> None:
    flow = free_running(batch_groups=1, group_size=1)
    flow.join("a", slots=4, live_versions=1, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    assert flow.committed("a", 1) == (1,), "it switched under an unfinished trajectory"
    assert flow.place_again(1) is None
    assert flow.switches() == (Switch(instance="a", load=0, retire=(1,)),)
    carry_out(flow)
    assert flow.switches() == (), "version 0 stays until the trajectory is placed and done"
    assert flow.place_again(1) == "a"
    assert flow.switches() == ()
    flow.generated(1)
    assert flow.switches() == (Switch(instance="a", load=1, retire=(0,)),)


def test_a_busy_fleet_drains_one_instance_to_bring_a_missing_version_back() -> None:
    flow = free_running(batch_groups=1, group_size=1, max_staleness=3)
    for name in ("a", "b"):
        flow.join(name, slots=4, live_versions=1, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    carry_out(flow)
    assert (flow.hosting(0), flow.hosting(1)) == (("b",), ("a",))
    assert ticket(flow).instances == ("a",)
    flow.join("c", slots=4, live_versions=1, versions=(1,))
    assert flow.leave("b") == (1,)
    assert flow.switches() == (Switch(instance="c", load=0, retire=(1,)),), "the idle one goes back"
    flow.leave("c")
    assert flow.switches() == (), "the only one left is busy"
    store(flow, 2, version=1)
    assert flow.take_batch(now=0.0, ttl=1.0) is not None
    assert flow.next_ticket() is None, "and gets nothing new until it has switched"
    carry_out(flow)
    assert flow.place_again(1) == "a"
    assert flow.next_ticket() is None
    flow.generated(1)
    carry_out(flow)
    assert ticket(flow).instances == ("a",)


def test_whoever_is_idle_first_brings_the_version_back() -> None:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=3, outstanding_batches=3))
    flow = Flow(policy=policy, batch_groups=1, group_size=1, lookahead=1.0)
    flow.join("z", slots=4, live_versions=1, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    for name in ("a", "b"):
        flow.join(name, slots=1, live_versions=1, versions=(1,))
    assert [ticket(flow).instances for _ in range(2)] == [("a",), ("b",)]
    flow.leave("z")
    assert flow.switches() == (), "both are busy, and a was chosen to drain"
    flow.generated(3)
    assert flow.switches() == (Switch(instance="b", load=0, retire=(1,)),)


def test_who_was_to_bring_a_version_back_and_got_full_meanwhile_must_drain() -> None:
    flow = free_running(batch_groups=1, group_size=1, max_staleness=3)
    flow.join("z", slots=4, live_versions=1, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    flow.join("a", slots=4, live_versions=1, versions=())
    assert flow.switches() == (Switch(instance="a", load=1, retire=()),)
    assert flow.leave("z") == (1,)
    assert flow.switches() == (Switch(instance="a", load=0, retire=()),)
    flow.committed("a", 1)
    assert flow.next_ticket() is None, "version 1 was on its way already; version 0 comes first all the same"
    assert flow.switches() == (Switch(instance="a", load=0, retire=(1,)),)


def test_new_groups_avoid_the_instance_that_drains() -> None:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=3, outstanding_batches=3))
    flow = Flow(policy=policy, batch_groups=2, group_size=1)
    flow.join("z", slots=4, live_versions=1, versions=(0,))
    for _ in range(3):
        ticket(flow)
    advance(flow, (0, 1), version=0)
    for name in ("a", "b"):
        flow.join(name, slots=4, live_versions=1, versions=(1,))
    assert [ticket(flow).instances for _ in range(3)] == [("a",), ("b",), ("a",)]
    flow.leave("z")
    assert flow.switches() == (), "b is the least loaded and drains for version 0"
    assert [ticket(flow).instances for _ in range(2)] == [("a",), ("a",)]
    flow.generated(4)
    assert flow.switches() == (Switch(instance="b", load=0, retire=(1,)),)


def test_missing_versions_are_brought_back_oldest_first_each_by_another_instance() -> None:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=3, outstanding_batches=3))
    flow = Flow(policy=policy, batch_groups=1, group_size=1)
    flow.join("z", slots=9, live_versions=4, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    carry_out(flow)
    ticket(flow), ticket(flow)
    advance(flow, (2,), version=1)
    flow.join("a", slots=4, live_versions=1, versions=())
    assert flow.leave("z") == (1, 3)
    assert flow.switches() == (Switch(instance="a", load=0, retire=()),)
    flow.join("b", slots=4, live_versions=1, versions=(2,))
    assert flow.switches() == (
        Switch(instance="a", load=0, retire=()),
        Switch(instance="b", load=1, retire=(2,)),
    )


def test_work_that_lost_its_version_no_longer_fills_the_instance() -> None:
    flow = free_running(batch_groups=4, group_size=1)
    flow.join("a", slots=2, live_versions=2, versions=(0,))
    assert [ticket(flow).instances for _ in range(3)] == [("a",)] * 3
    assert flow.next_ticket() is None
    assert flow.retired_on("a", 0) == (0, 1, 2)
    flow.committed("a", 0)
    assert [flow.place_again(t) for t in (0, 1)] == ["a", "a"]
    assert ticket(flow).instances == ("a",)


def test_a_missing_version_goes_where_there_is_room_before_anything_is_given_up() -> None:
    flow = free_running(batch_groups=1, group_size=1)
    flow.join("a", slots=4, live_versions=2, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    flow.join("b", slots=4, live_versions=1, versions=(1,))
    flow.join("c", slots=4, live_versions=2, versions=(1,))
    flow.leave("a")
    assert flow.switches() == (Switch(instance="c", load=0, retire=()),)


def test_a_pinned_version_stays_everywhere_and_comes_back_when_lost() -> None:
    flow = free_running(batch_groups=1, group_size=1)
    for name in ("a", "b"):
        flow.join(name, slots=4, live_versions=1, versions=(0,))
    flow.pin(0)
    ticket(flow)
    advance(flow, (0,), version=0)
    assert flow.switches() == ()
    assert flow.retirable() == ()
    flow.leave("a")
    flow.leave("b")
    flow.join("c", slots=4, live_versions=2, versions=(0, 1))
    assert flow.switches() == ()
    flow.retired_on("c", 0)
    assert flow.switches() == (Switch(instance="c", load=0, retire=()),)
    flow.unpin(0)
    assert flow.switches() == ()
    assert flow.retirable() == (0,)


def test_a_trajectory_that_is_generated_anew_finds_its_version_again() -> None:
    flow = free_running(batch_groups=1, group_size=1)
    flow.join("a", slots=4, live_versions=1, versions=(0,))
    ticket(flow), ticket(flow)
    advance(flow, (0,), version=0)
    flow.generated(1)
    carry_out(flow)
    assert flow.hosting(0) == ()
    assert flow.place_again(1) is None, "its scoring failed, and nobody hosts version 0 any more"
    carry_out(flow)
    assert flow.place_again(1) == "a"


def test_ids_follow_the_first_group() -> None:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=1))
    flow = Flow(policy=policy, batch_groups=3, group_size=4, first_group=7, version=2)
    flow.join("a", slots=100, live_versions=1, versions=(2,))
    tickets = [ticket(flow) for _ in range(3)]
    assert [found.group for found in tickets] == [7, 8, 9]
    assert Counter(t for found in tickets for t in found.trajectories) == Counter(range(28, 40))
    assert flow.next_group == 10
