"""What holds of the flow where trajectories go on under newer versions in the middle of their answers."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.contract import Interruption
from headrace.errors import StalenessError
from headrace.flow import Flow, Switch
from headrace_staleness.partial_rollout import PartialRollout
from support.dora_world import Stream, World
from support.flow_steps import advance, carry_out, store, ticket
from support.profiles import EVENTS, machine
from support.tails import heavy_tailed

REPLICA = st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 2, 3]), st.booleans())


def partial_rollout(max_staleness: int, outstanding_batches: float | None = None) -> PartialRollout:
    settings = PartialRollout.Settings(max_staleness=max_staleness, outstanding_batches=outstanding_batches)
    return PartialRollout(settings)


class InterruptionMachine(RuleBasedStateMachine):
    """The tokens of a cluster that is interrupted, loses instances and gives batches back, in any order."""

    @initialize(
        bound=st.sampled_from([(2, None), (1, None), (3, 3.0), (3, 1.5), (4, None), (2, 1.0)]),
        sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
        replicas=st.lists(REPLICA, min_size=1, max_size=5),
        seed=st.integers(0, 2**32),
        calm=st.booleans(),
    )
    def begin(
        self,
        bound: tuple[int, float | None],
        sizes: tuple[int, int],
        replicas: list[tuple[int, int, bool]],
        seed: int,
        calm: bool,
    ) -> None:
        self.policy = partial_rollout(*bound)
        self.world = World(
            self.policy,
            batch_groups=sizes[0],
            group_size=sizes[1],
            replicas=replicas,
            seed=seed,
            length=heavy_tailed,
            calm=calm,
        )
        self.flow = self.world.flow

    @rule(count=st.integers(10, 40))
    def go_on(self, count: int) -> None:
        """Hypothesis draws stretches; what happens within one is the world's own draw."""
        self.go_on_until(self.world.steps + count)

    def go_on_until(self, steps: int) -> None:
        while self.world.steps < steps:
            self.world.step()
            self.check()

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "world"):
            return
        self.versions_never_fall_within_an_answer()
        self.staleness_is_bounded_by_the_oldest_token()
        self.nothing_is_lost_or_counted_twice()
        self.everybody_is_under_the_newest_version_of_its_instance()
        self.nobody_moves()

    def versions_never_fall_within_an_answer(self) -> None:
        for stream in self.world.streams.values():
            versions = [version for version, _ in stream.tokens]
            assert versions == sorted(versions)
            assert all(version >= stream.version for version in versions)

    def staleness_is_bounded_by_the_oldest_token(self) -> None:
        bound = self.policy.max_staleness
        assert all(0 <= staleness <= bound for staleness in self.world.staleness)
        oldest = self.world.version - bound
        assert all(version > oldest for version in self.flow.view().in_flight)

    def nothing_is_lost_or_counted_twice(self) -> None:
        world, counts = self.world, self.flow.counts()
        states = Counter(stream.state for stream in world.streams.values())
        assert counts.dispatched == len(world.streams)
        assert counts.trained == states["trained"] == sum(map(len, world.batches))
        assert counts.buffered == states["stored"]
        assert counts.in_flight == states["waiting"] + states["generated"]
        assert counts.dropped == dict(world.dropped)

    def everybody_is_under_the_newest_version_of_its_instance(self) -> None:
        for name, replica in self.world.replicas.items():
            assert len(replica.versions) <= replica.live_versions
            for trajectory in replica.running:
                assert self.flow.instance_of(trajectory) == name
                assert self.flow.version_of(trajectory) == self.world.streams[trajectory].under == max(replica.versions)
        live = self.flow.live_versions()
        assert all(stream.under in live for stream in self.running())

    def running(self) -> list[Stream]:
        world = self.world
        return [world.streams[t] for replica in world.replicas.values() for t in replica.running]

    def nobody_moves(self) -> None:
        assert self.flow.moves() == ()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.go_on_until(EVENTS)
            self.versions_follow_one_another_for_ever()

    def versions_follow_one_another_for_ever(self) -> None:
        world = self.world
        world.calm = True
        if not world.replicas.keys() - world.draining:
            world.join(2, 1, False)
        wanted = world.version + self.policy.max_staleness + 2
        for _ in range(60 * (self.policy.max_staleness + 2)):
            if world.version < wanted:
                world.settle()
                self.check()
        assert world.version >= wanted, f"stuck at {self.flow.view()} with {self.flow.switches()}"
        assert not world.draining, "who drains leaves in the end"


InterruptionMachine.TestCase.settings = machine(examples=25, steps=12, suppress_health_check=list(HealthCheck))
TestInterruptionHoldsUnderAnyInterleaving = InterruptionMachine.TestCase


def test_long_answers_are_interrupted_and_keep_what_they_have() -> None:
    replicas = [(4, 1, False), (4, 2, True)]
    world = World(
        partial_rollout(3), batch_groups=2, group_size=2, replicas=replicas, seed=0, length=heavy_tailed, calm=True
    )
    while world.version < 20:
        world.step()
    mixed = [row for rows in world.batches for row in rows if len({v for v, _ in world.streams[row].tokens}) > 1]
    assert len(mixed) > 10
    assert world.interrupted >= len(mixed)
    assert all(len(world.streams[row].tokens) == world.streams[row].length for row in mixed)


def flow_of(*, live_versions: int, instances: int = 1) -> Flow:
    """Two groups of two to a batch, K = 2; every instance hosts version 0."""
    flow = Flow(policy=partial_rollout(2), batch_groups=2, group_size=2)
    for number in range(instances):
        flow.join(f"i{number}", slots=8, live_versions=live_versions, versions=(0,), migrates=True)
    return flow


@pytest.mark.parametrize("live_versions", [1, 2])
def test_what_is_unfinished_goes_on_under_the_version_that_its_instance_commits(live_versions: int) -> None:
    flow = flow_of(live_versions=live_versions)
    tickets = [ticket(flow) for _ in range(4)]
    advance(flow, (0, 1), version=0)
    assert flow.switches() == (Switch(instance="i0", load=1, retire=()),)
    assert flow.committed("i0", 1) == ()
    unfinished = [t for given in tickets[2:] for t in given.trajectories]
    assert [flow.version_of(t) for t in unfinished] == [1] * 4
    assert [flow.instance_of(t) for t in unfinished] == ["i0"] * 4
    assert flow.view().in_flight == {0: 2}, "it is as old as its oldest token"


def test_a_version_that_nobody_generates_under_is_retired_though_groups_that_began_under_it_are_in_flight() -> None:
    flow = flow_of(live_versions=2, instances=2)
    for _ in range(4):
        ticket(flow)
    advance(flow, (0, 1), version=0)
    flow.committed("i0", 1)
    assert flow.retirable() == (), "the other one generates under it still"
    with pytest.raises(ValueError, match="version 0 is not retirable"):
        flow.retired(0)
    flow.committed("i1", 1)
    assert flow.retirable() == (0,)
    flow.retired(0)
    carry_out(flow)
    assert flow.hosting(0) == ()
    assert flow.view().in_flight == {0: 2}


def test_an_instance_keeps_a_pinned_version_beside_the_one_it_goes_on_under() -> None:
    flow = flow_of(live_versions=2)
    for _ in range(4):
        ticket(flow)
    flow.pin(0)
    advance(flow, (0, 1), version=0)
    carry_out(flow)
    assert flow.switches() == ()
    assert flow.hosting(0) == flow.hosting(1) == ("i0",)
    assert flow.retirable() == ()


def test_an_instance_with_room_for_one_version_waits_for_the_pin() -> None:
    flow = flow_of(live_versions=1)
    for _ in range(4):
        ticket(flow)
    flow.pin(0)
    advance(flow, (0, 1), version=0)
    assert flow.switches() == ()
    flow.unpin(0)
    assert flow.switches() == (Switch(instance="i0", load=1, retire=()),)


def test_what_a_lost_instance_had_begins_anew_under_the_newest_version_that_somebody_hosts() -> None:
    flow = flow_of(live_versions=2, instances=2)
    for _ in range(4):
        ticket(flow)
    flow.pin(0)
    advance(flow, (0, 1), version=0)
    flow.committed("i0", 1)
    assert flow.hosting(0) == ("i0", "i1")
    displaced = flow.leave("i1")
    assert displaced
    for trajectory in displaced:
        assert flow.place_again(trajectory) == "i0"
        assert flow.version_of(trajectory) == 1


def test_nothing_begins_anew_under_a_version_that_was_retired_though_an_instance_still_serves_it() -> None:
    flow = flow_of(live_versions=1)
    for _ in range(4):
        ticket(flow)
    advance(flow, (0, 1), version=0)
    unplaced = flow.leave("i0")
    flow.join("i1", slots=8, live_versions=1, versions=(0,))
    flow.retired(0)
    assert {flow.place_again(trajectory) for trajectory in unplaced} == {None}
    carry_out(flow)
    assert {flow.place_again(trajectory) for trajectory in unplaced} == {"i1"}
    assert {flow.version_of(trajectory) for trajectory in unplaced} == {1}


def test_what_waits_for_an_instance_waits_for_no_version() -> None:
    flow = flow_of(live_versions=1)
    for _ in range(4):
        ticket(flow)
    advance(flow, (0, 1), version=0)
    unplaced = flow.leave("i0")
    flow.join("i0", slots=8, live_versions=1, versions=())
    assert flow.switches() == (Switch(instance="i0", load=1, retire=()),), "version 0 is not brought back"
    carry_out(flow)
    assert {flow.place_again(trajectory) for trajectory in unplaced} == {"i0"}
    assert flow.retirable() == (0,)


def test_a_token_older_than_its_group_is_refused_and_a_newer_one_makes_the_row_younger() -> None:
    flow = flow_of(live_versions=1)
    for _ in range(4):
        ticket(flow)
    advance(flow, (0, 1), version=0)
    carry_out(flow)
    for _ in range(2):
        ticket(flow)
    store(flow, 2, version=0)
    store(flow, 3, version=1)
    assert flow.view().ready == {0: 1, 1: 1}
    with pytest.raises(StalenessError, match="trajectory 8 has a token of version 0, its group started under 1"):
        flow.stored(8, version=0, tokens=1, nbytes=1)


def test_the_policy_says_what_becomes_of_an_interrupted_answer() -> None:
    assert partial_rollout(2).interruption == Interruption(keep_kv=False, mask_older=False)
    settings = PartialRollout.Settings(max_staleness=2, keep_kv=True, mask_older=True)
    assert PartialRollout(settings).interruption == Interruption(keep_kv=True, mask_older=True)


def test_a_bound_of_zero_is_the_synchronous_run_in_which_nothing_is_interrupted() -> None:
    assert partial_rollout(0).interruption is None
    assert partial_rollout(0).lockstep
    assert not partial_rollout(1).lockstep


def test_demonstrations_are_never_interrupted() -> None:
    flow = Flow(policy=partial_rollout(2), batch_groups=2, group_size=1, rollout=False)
    for _ in range(4):
        ticket(flow)
    advance(flow, (0, 1), version=0)
    assert flow.interruption is None
    assert flow.retirable() == (), "groups of version 0 are in flight"
