"""Which trajectories go on elsewhere: consolidation of the long tail, and relief of instances short of memory."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.contract import FlowView
from headrace.flow import Flow, Move
from headrace.flow.fleet import Fleet
from headrace.flow.rebalancing import Rebalancing
from headrace.flow.versions import Versions
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous

SLOTS = 4


class FillsTheSlots(MultiVersion):
    """As many groups may start as the fleet has slots for."""

    def __init__(self, settings: MultiVersion.Settings, *, slots: int) -> None:
        super().__init__(settings)
        self.slots = slots

    def admit(self, view: FlowView) -> int:
        return self.slots - sum(view.in_flight.values())

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        return True


def tail(left: dict[str, int], *, migrates: bool = True, live_versions: int = 1, instances: int = 4) -> Flow:
    """A fleet of which instances ``a``, ``b`` … have so many trajectories of version 0 left, and version 1 is out. One
    trajectory makes a group, and under version 1 as many may start as the fleet has slots beside them."""
    names = "abcdefgh"[:instances]
    policy = FillsTheSlots(MultiVersion.Settings(max_staleness=3), slots=instances * SLOTS)
    flow = Flow(policy=policy, batch_groups=4, group_size=1, lookahead=1.0)
    for name in names:
        flow.join(name, slots=SLOTS, live_versions=live_versions, versions=(0,), migrates=migrates)
    while flow.next_ticket() is not None:
        pass
    rows: dict[str, list[int]] = {name: [] for name in names}
    for trajectory in range(flow.next_group):
        rows[flow.instance_of(trajectory)].append(trajectory)
    for name, placed in rows.items():
        for trajectory in placed[left.get(name, 0) :]:
            assert flow.stored(trajectory, version=0, tokens=1, nbytes=1)
    while flow.view().ready.get(0, 0) < flow.batch_groups:
        flow.join("extra", slots=1, live_versions=1, versions=(0,))
        ticket = flow.next_ticket()
        assert ticket is not None
        assert flow.stored(ticket.trajectories[0], version=0, tokens=1, nbytes=1)
        flow.leave("extra")
    lease = flow.take_batch(now=0.0, ttl=1.0)
    assert lease is not None
    flow.trained(lease.lease)
    flow.published(1)
    return flow


def routes(moves: tuple[Move, ...]) -> dict[int, tuple[str, str]]:
    return {move.trajectory: (move.source, move.target) for move in moves}


def sources(flow: Flow) -> list[str]:
    return sorted(move.source for move in flow.moves())


def test_the_long_tail_goes_onto_few_instances_and_the_others_switch() -> None:
    flow = tail({"a": 2, "b": 2, "c": 1, "d": 1})
    moves = flow.moves()
    assert [(move.source, move.target, move.version, move.with_state) for move in moves] == [
        ("c", "a", 0, True),
        ("d", "a", 0, True),
    ]
    assert flow.switches() == (), "nobody has left yet"
    for move in moves:
        assert flow.moved(move.trajectory)
        assert flow.instance_of(move.trajectory) == move.target
    assert [(switch.instance, switch.load, switch.retire) for switch in flow.switches()] == [
        ("c", 1, (0,)),
        ("d", 1, (0,)),
    ]


def test_a_move_is_repeated_until_it_was_carried_out_and_reserves_its_place() -> None:
    flow = tail({"a": 3, "b": 3, "c": 1, "d": 1})
    wanted = routes(flow.moves())
    assert sorted(wanted.values()) == [("c", "b"), ("d", "a")]
    assert routes(flow.moves()) == wanted
    flow.rebalance()
    assert routes(flow.moves()) == wanted
    first = min(wanted)
    assert flow.moved(first)
    assert routes(flow.moves()) == {t: route for t, route in wanted.items() if t != first}
    assert not flow.moved(first), "it has none any more"


def test_whose_instance_keeps_its_version_stays_dora_9() -> None:
    flow = tail({"a": 3, "b": 1}, live_versions=2)
    assert [(switch.load, switch.retire) for switch in flow.switches()] == [(1, ())] * 4
    assert flow.moves() == (), "there is a seat for version 1 beside version 0"


def test_an_instance_that_has_the_newest_version_beside_keeps_what_it_has() -> None:
    fleet, versions = Fleet(lookahead=1.0), Versions(0)
    versions.publish(1)
    fleet.join("a", slots=SLOTS, live_versions=1, versions=(0,))
    fleet.join("b", slots=SLOTS, live_versions=1, versions=(0,))
    fleet.join("c", slots=SLOTS, live_versions=2, versions=(0, 1))
    for trajectory, name in enumerate(["a", "a", "b", "c"]):
        fleet.place(trajectory, 0, next(i for i in fleet.instances if i.name == name))
    rebalancing = Rebalancing(fleet, versions, top_up=lambda: 40, kv_threshold=0.9)
    assert routes(rebalancing.moves(lambda trajectory: 1)) == {2: ("b", "a")}, "one seat for version 0, three for 1"


def test_an_instance_that_is_being_filled_is_not_emptied() -> None:
    fleet, versions = Fleet(lookahead=1.0), Versions(0)
    versions.publish(1)
    for name in "abc":
        fleet.join(name, slots=SLOTS, live_versions=1, versions=(0,))
    a, b, c = fleet.instances
    for trajectory, instance in enumerate([a, a, b, c]):
        fleet.place(trajectory, 0, instance)
    fleet.bind(3, 0, b)
    rebalancing = Rebalancing(fleet, versions, top_up=lambda: 40, kv_threshold=0.9)
    assert routes(rebalancing.moves(lambda trajectory: 1)) == {3: ("c", "b")}


def test_an_instance_is_emptied_whole_or_not_at_all() -> None:
    flow = tail({"a": 4, "b": 4, "c": 3, "d": 3})
    assert flow.moves() == (), "a and b have no idle slot, and c and d have three to move"


def test_a_move_that_finishes_first_is_forgotten_and_frees_its_place() -> None:
    flow = tail({"a": 3, "b": 3, "c": 1, "d": 1})
    first, second = sorted(routes(flow.moves()))
    flow.generated(first)
    assert list(routes(flow.moves())) == [second]
    assert not flow.moved(first)
    assert flow.stored(second, version=0, tokens=1, nbytes=1)
    assert flow.moves() == ()
    assert flow.hosting(0) == ("a", "b", "c", "d")


def test_a_move_whose_target_is_lost_leaves_the_trajectory_where_it_is() -> None:
    flow = tail({"a": 2, "b": 2, "c": 1, "d": 1})
    move = flow.moves()[0]
    displaced = flow.leave(move.target)
    assert move.trajectory not in displaced
    assert len(displaced) == 2
    assert flow.instance_of(move.trajectory) == move.source
    assert not flow.moved(move.trajectory)


def test_a_move_whose_source_is_lost_leaves_the_trajectory_unplaced() -> None:
    flow = tail({"a": 2, "b": 2, "c": 1, "d": 1})
    move = flow.moves()[0]
    assert flow.leave(move.source) == (move.trajectory,)
    assert flow.unplaced() == (move.trajectory,)
    assert not flow.moved(move.trajectory)
    assert flow.place_again(move.trajectory) in ("a", "b", "d")


def test_a_move_that_was_called_off_is_decided_anew_only_when_due() -> None:
    flow = tail({"a": 2, "b": 2, "c": 1, "d": 1})
    move = flow.moves()[0]
    flow.stays(move.trajectory)
    assert move.trajectory not in routes(flow.moves())
    assert flow.instance_of(move.trajectory) == move.source
    flow.rebalance()
    assert move.trajectory in routes(flow.moves())


def test_without_a_hand_over_a_move_must_gain_more_than_it_computes_again() -> None:
    """One trajectory leaves three idle slots behind it; three leave one."""
    cheap = tail({"a": 1, "b": 1, "c": 1, "d": 1}, migrates=False)
    assert sources(cheap) == ["b", "c", "d"]
    assert not any(move.with_state for move in cheap.moves())
    left = {"a": 3, "b": 3, "c": 3, "d": 3, "e": 0, "f": 0}
    assert tail(left, migrates=False, instances=6).moves() == ()


def test_long_contexts_make_a_move_dear() -> None:
    """Two of 100 tokens: 200 to compute again, for two slots over another 100. One of 10 among them: 110."""
    left = {"a": 2, "b": 2, "c": 2, "d": 2}
    flow = tail(left, migrates=False)
    assert flow.moves(lambda trajectory: 100) == ()
    flow.rebalance()
    assert len(flow.moves(lambda trajectory: 100 if trajectory < 8 and trajectory < 4 else 10)) > 0


def test_what_the_newest_version_does_not_need_is_left_alone() -> None:
    flow = tail({"a": 2, "b": 2, "c": 1, "d": 1})
    flow.drop_all("nothing is left")
    assert flow.moves() == ()


def test_a_version_that_is_pinned_stays_everywhere() -> None:
    flow = tail({"a": 2, "b": 2, "c": 1, "d": 1})
    flow.pin(0)
    assert flow.moves() == ()


def test_an_instance_under_pressure_gets_nothing_more_and_hands_over_its_youngest() -> None:
    policy = MultiVersion(MultiVersion.Settings(max_staleness=2))
    flow = Flow(policy=policy, batch_groups=16, group_size=1, kv_threshold=0.8)
    for name in ("a", "b"):
        flow.join(name, slots=8, live_versions=1, versions=(0,))
    tickets = [flow.next_ticket() for _ in range(8)]
    assert [ticket and ticket.instances for ticket in tickets] == [("a",), ("b",)] * 4
    flow.kv_used("a", 0.79)
    assert flow.moves() == ()
    flow.kv_used("a", 1.0)
    moves = flow.moves(lambda trajectory: 100 - trajectory)
    assert routes(moves) == {6: ("a", "b")}, "one in five is beyond the threshold, and the youngest is the cheapest"
    flow.kv_used("a", 0.95)
    assert routes(flow.moves()) == routes(moves), "it is on its way already"
    found = flow.next_ticket()
    assert found is not None
    assert found.instances == ("b",), "although a has fewer"
    flow.kv_used("b", 0.9)
    assert flow.next_ticket() is None
    flow.kv_used("a", 0.5)
    found = flow.next_ticket()
    assert found is not None
    assert found.instances == ("a",)


def test_nothing_moves_in_lockstep() -> None:
    flow = Flow(policy=Synchronous(Synchronous.Settings()), batch_groups=4, group_size=1)
    for name in ("a", "b"):
        flow.join(name, slots=1, live_versions=1, versions=(0,))
    while flow.next_ticket() is not None:
        pass
    flow.kv_used("a", 1.0)
    assert flow.moves() == ()


def thin_out(flow: Flow, left: dict[str, int]) -> None:
    for name, count in left.items():
        for trajectory in [t for t in range(flow.next_group) if flow.instance_of(t) == name][count:]:
            assert flow.stored(trajectory, version=0, tokens=1, nbytes=1)


@pytest.mark.parametrize("trigger", ["batch", "timer", "member", "pressure"])
def test_nothing_is_decided_unless_something_is_due(trigger: str) -> None:
    flow = tail({"a": 4, "b": 4, "c": 4, "d": 3})
    assert flow.moves() == (), "a publication made it due, and there was nothing to move"
    thin_out(flow, {"a": 2, "b": 2, "c": 1, "d": 1})
    assert flow.moves() == ()
    match trigger:
        case "batch":
            assert flow.take_batch(now=0.0, ttl=1.0) is not None
        case "timer":
            flow.rebalance()
        case "member":
            flow.join("e", slots=1, live_versions=1, versions=())
        case "pressure":
            flow.kv_used("a", 1.0)
    assert flow.moves() != ()
