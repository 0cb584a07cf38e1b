"""DORA's properties (arXiv 2604.26256), by name, under arbitrary interleavings of whatever can happen.

C1: every token of a trajectory is of one version. C2: none is lost. C3: staleness is bounded. Liveness: it goes on.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.flow import Move
from headrace_staleness.multi_version import MultiVersion
from support.dora_world import LOOKAHEAD, World, token
from support.flow_model import most_in_flight
from support.profiles import EVENTS, machine
from support.tails import heavy_tailed

POLICIES = [
    MultiVersion(MultiVersion.Settings(max_staleness=bound, outstanding_batches=outstanding, **more))
    for bound, outstanding, more in [
        (2, None, {}),
        (1, None, {}),
        (3, 3.0, {}),
        (3, 1.5, {}),
        (4, None, {}),
        (2, 1.0, {}),
        (3, 3.0, {"legacy_filling": True}),
        (5, 4.0, {"legacy_filling": True}),
        (2, None, {"waits": "batch"}),
        (1, None, {"waits": "batch"}),
        (4, 4.0, {"waits": "batch", "legacy_filling": True}),
    ]
]
REPLICA = st.tuples(st.integers(1, 4), st.sampled_from([1, 1, 1, 2, 3]), st.booleans())


class DoraMachine(RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        sizes=st.tuples(st.integers(1, 4), st.integers(1, 3)),
        replicas=st.lists(REPLICA, min_size=1, max_size=5),
        seed=st.integers(0, 2**32),
        calm=st.booleans(),
        observant=st.booleans(),
        streaming=st.booleans(),
    )
    def begin(
        self,
        policy: MultiVersion,
        sizes: tuple[int, int],
        replicas: list[tuple[int, int, bool]],
        seed: int,
        calm: bool,
        observant: bool,
        streaming: bool,
    ) -> None:
        self.policy = policy
        self.world = World(
            self.policy,
            batch_groups=sizes[0],
            group_size=sizes[1],
            replicas=replicas,
            seed=seed,
            length=heavy_tailed,
            calm=calm,
            observant=observant,
            streaming=streaming,
        )
        self.flow = self.world.flow
        self.asked: dict[int, Move] = {}
        self.brim = 1 if observant else LOOKAHEAD
        """Of slots: a group that will take long is not queued behind others."""

    @rule(count=st.integers(10, 40))
    def go_on(self, count: int) -> None:
        """Hypothesis draws stretches; what happens within one is the world's own draw."""
        self.go_on_until(self.world.steps + count)

    def go_on_until(self, steps: int) -> None:
        while self.world.steps < steps:
            self.world.step()
            self.check()

    # ------------------------------------------------------------ what always holds

    @invariant()
    def check(self) -> None:
        if not hasattr(self, "world"):
            return
        self.dora_1_every_token_of_a_trajectory_is_of_its_version()
        self.dora_2_nothing_is_lost_or_counted_twice()
        self.dora_3_staleness_and_versions_are_bounded()
        self.dora_4_nothing_of_an_expelled_version_is_in_flight()
        self.dora_6_an_instance_hosts_no_more_versions_than_it_can()
        self.dora_8_what_is_handed_over_goes_on_as_if_it_had_not_moved()
        self.dora_9_only_who_must_move_moves()
        self.everybody_is_where_the_flow_says()

    def dora_1_every_token_of_a_trajectory_is_of_its_version(self) -> None:
        for stream in self.world.streams.values():
            assert {version for version, _ in stream.tokens} <= {stream.version}

    def dora_2_nothing_is_lost_or_counted_twice(self) -> None:
        world, counts = self.world, self.flow.counts()
        states = Counter(stream.state for stream in world.streams.values())
        assert counts.dispatched == len(world.streams)
        assert counts.trained == states["trained"] == sum(map(len, world.batches))
        assert counts.buffered == states["stored"]
        assert counts.in_flight == states["waiting"] + states["generated"]
        assert counts.dropped == dict(world.dropped)
        size = world.group_size
        for rows in world.batches[-1:]:
            groups = {row // size for row in rows}
            assert sorted(rows) == sorted(g * size + member for g in groups for member in range(size)), "whole groups"

    def dora_3_staleness_and_versions_are_bounded(self) -> None:
        bound = self.policy.max_staleness
        assert all(0 <= staleness <= bound for staleness in self.world.staleness[-self.world.batch_groups * 3 :])
        assert len(self.flow.view().in_flight) <= most_in_flight(self.policy)

    def dora_4_nothing_of_an_expelled_version_is_in_flight(self) -> None:
        oldest = self.world.version + 1 - most_in_flight(self.policy)
        assert all(version >= oldest for version in self.flow.view().in_flight)

    def dora_6_an_instance_hosts_no_more_versions_than_it_can(self) -> None:
        for name, replica in self.world.replicas.items():
            assert len(replica.versions) <= replica.live_versions
            assert all(name in self.flow.hosting(version) for version in replica.versions)

    def dora_8_what_is_handed_over_goes_on_as_if_it_had_not_moved(self) -> None:
        """The sampler's stream is that of the request; and only instances that cannot hand it over compute again."""
        for trajectory, stream in self.world.streams.items():
            if stream.state == "waiting":
                found = [value for _, value in stream.tokens]
                assert found == [token(trajectory, place, stream.version) for place in range(len(found))]
        assert self.world.moved[False] or not any(stream.computed_again for stream in self.world.streams.values())

    def dora_9_only_who_must_move_moves(self) -> None:
        """An instance with a seat for the newest version keeps what it has, unless its memory is short or it drains.
        Who drains is sent nothing, though what is on its way there arrives."""
        pending = {move.trajectory: move for move in self.world.moves()}
        for move in pending.values():
            source, target = self.world.replicas[move.source], self.world.replicas[move.target]
            assert move.version in target.versions
            if self.asked.get(move.trajectory) == move:
                continue
            assert move.target not in self.world.draining
            if source.kv_used < 0.9 and move.source not in self.world.draining:
                assert self.world.version not in source.versions
                assert len(source.versions) == source.live_versions
        self.asked = pending

    def everybody_is_where_the_flow_says(self) -> None:
        running = {t: name for name, replica in self.world.replicas.items() for t in replica.running}
        waiting = [t for t, stream in self.world.streams.items() if stream.state == "waiting"]
        for trajectory in waiting:
            assert self.flow.instance_of(trajectory) == running.get(trajectory, "")
        assert set(self.flow.unplaced()) == set(waiting) - set(running)
        for name, replica in self.world.replicas.items():
            assert self.world.load_of(name) < replica.slots * LOOKAHEAD + self.world.group_size

    @rule()
    def dora_10_the_newest_version_is_topped_up_first_and_to_the_brim(self) -> None:
        world, flow = self.world, self.flow
        before = len(world.streams)
        world.start()
        versions = [stream.version for stream in list(world.streams.values())[before:]]
        assert versions == sorted(versions, reverse=True)
        assert self.policy.settings.legacy_filling or set(versions) <= {world.version}
        drains = flow.unplaced() or flow.may_publish()
        if self.policy.admit(flow.view()) > 0 and not drains:
            for name in flow.hosting(world.version):
                replica = world.replicas[name]
                full = replica.kv_used >= 0.9 or name in world.draining
                assert full or world.load_of(name) >= replica.slots * self.brim

    # ------------------------------------------------------------ it always gets further

    def teardown(self) -> None:
        if hasattr(self, "world"):
            self.go_on_until(EVENTS)
            self.dora_5_the_window_always_advances()
            self.dora_7_a_version_that_is_empty_holds_no_instance()

    def dora_5_the_window_always_advances(self) -> None:
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

    def dora_7_a_version_that_is_empty_holds_no_instance(self) -> None:
        world = self.world
        while world.loading or self.flow.switches():
            for switch in self.flow.switches():
                world.carry_out(switch)
            while world.loading:
                world.load()
        unfinished = {world.version, *self.flow.view().in_flight}
        assert all(replica.versions <= unfinished for replica in world.replicas.values())


DoraMachine.TestCase.settings = machine(examples=25, steps=12, suppress_health_check=list(HealthCheck))
TestDoraHoldsUnderAnyInterleaving = DoraMachine.TestCase
