"""The whole flow under random interleavings, against a plain model that keeps every trajectory as an object.

Tickets, completions, duplicates, late writes, instances that join, leave and switch, retries, leases that expire,
skipped batches, publishes, pins and drops come in any order; after each the invariants must hold, and from wherever
that ends, a driver that merely completes everything must always get further.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.contract import StalenessPolicy
from headrace.errors import StalenessError
from headrace.flow import BatchLease, Flow, Switch
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.synchronous import Synchronous

LOOKAHEAD = 1.25
NAMES = ("a", "b", "c")
RANDOM = st.randoms(use_true_random=False)


@dataclass
class Trajectory:
    version: int
    state: str = "waiting"
    """waiting (for its tokens) → generated → stored → trained; or dropped."""


@dataclass
class Node:
    slots: int
    live_versions: int
    versions: set[int]


@st.composite
def policies(draw: st.DrawFn) -> StalenessPolicy:
    if draw(st.booleans()) and draw(st.booleans()):
        return Synchronous(Synchronous.Settings())
    most = draw(st.integers(0, 3))
    outstanding = draw(st.one_of(st.none(), st.sampled_from([1.0, 1.5, 2.0, 3.0]).filter(lambda o: o <= max(most, 1))))
    return MultiVersion(MultiVersion.Settings(max_staleness=most, outstanding_batches=outstanding))


class FlowMachine(RuleBasedStateMachine):
    @initialize(
        policy=policies(),
        batch=st.integers(1, 3),
        group=st.integers(1, 3),
        first=st.integers(0, 5),
        version=st.integers(0, 3),
        live_versions=st.lists(st.integers(1, 4), min_size=1, max_size=2),
        past=st.tuples(st.integers(0, 2**32), st.sampled_from([200, 50, 0]), st.booleans()),
    )
    def begin(
        self,
        policy: StalenessPolicy,
        batch: int,
        group: int,
        first: int,
        version: int,
        live_versions: list[int],
        past: tuple[int, int, bool],
    ) -> None:
        self.policy, self.batch, self.group, self.version = policy, batch, group, version
        self.first = first * group
        self.flow = Flow(
            policy=policy,
            batch_groups=batch,
            group_size=group,
            version=self.version,
            first_group=first,
            lookahead=LOOKAHEAD,
        )
        self.rows: dict[int, Trajectory] = {}
        self.nodes: dict[str, Node] = {}
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.pins: Counter[int] = Counter()
        self.lease: BatchLease | None = None
        self.batch_trained = False
        self.could_publish = False
        self.now = 0.0
        self.batches = 0
        for places in live_versions:
            self.join(slots=4, live_versions=places, hosts=True)
        seed, count, calm = past
        self.a_while(seed=seed, count=count, calm=calm)

    # ------------------------------------------------------------ the model

    def pick(self, random: Random, *states: str) -> int | None:
        found = sorted(t for t, row in self.rows.items() if row.state in states)
        return random.choice(found) if found else None

    def members(self, group: int) -> range:
        return range(group * self.group, (group + 1) * self.group)

    def leased(self, group: int) -> bool:
        return self.lease is not None and group in self.lease.groups

    def groups(self, *, complete: bool) -> list[int]:
        """Outstanding groups that are not on lease."""
        states: dict[int, set[str]] = {}
        for trajectory, row in self.rows.items():
            states.setdefault(trajectory // self.group, set()).add(row.state)
        return [
            group
            for group, found in states.items()
            if not found & {"trained", "dropped"} and not self.leased(group) and (found == {"stored"}) == complete
        ]

    def capacity(self, name: str) -> float:
        """What an instance may hold: the last group given may pass the mark."""
        return self.nodes[name].slots * LOOKAHEAD + self.group

    # ------------------------------------------------------------ what happens

    @rule()
    def ticket(self) -> None:
        ticket = self.flow.next_ticket()
        if ticket is None:
            return
        assert ticket.version == self.version
        assert ticket.trajectories == tuple(self.members(ticket.group))
        assert not set(ticket.trajectories) & set(self.rows)
        for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
            self.rows[trajectory] = Trajectory(version=self.version)
            if instance or not self.policy.lockstep:
                assert self.version in self.nodes[instance].versions
        assert (ticket.cohort is None) == (not ticket.cohort_sizes)

    @rule(random=RANDOM)
    def generate(self, random: Random) -> None:
        if (trajectory := self.pick(random, "waiting")) is not None:
            self.flow.generated(trajectory)
            self.rows[trajectory].state = "generated"
            assert self.flow.instance_of(trajectory) == ""

    @rule(random=RANDOM)
    def store(self, random: Random) -> None:
        if (trajectory := self.pick(random, "waiting", "generated")) is not None:
            row = self.rows[trajectory]
            assert self.flow.stored(trajectory, version=row.version, tokens=trajectory, nbytes=10)
            row.state = "stored"

    @rule(random=RANDOM)
    def store_again_or_late(self, random: Random) -> None:
        if (trajectory := self.pick(random, "stored", "trained", "dropped")) is not None:
            row = self.rows[trajectory]
            assert not self.flow.stored(trajectory, version=row.version, tokens=1, nbytes=10)
            self.refused["duplicate" if row.state == "stored" else "late"] += 1

    @rule(below=st.booleans())
    def store_unknown(self, below: bool) -> None:
        trajectory = self.first - 1 if below else self.flow.next_group * self.group
        assert not self.flow.stored(trajectory, version=self.version, tokens=1, nbytes=10)
        self.refused["unknown"] += 1

    @rule(random=RANDOM, off=st.sampled_from([-1, 1]))
    def store_from_another_version(self, random: Random, off: int) -> None:
        if (trajectory := self.pick(random, "waiting", "generated")) is not None:
            version = self.rows[trajectory].version - 1 if off < 0 else self.version + 1
            with pytest.raises(StalenessError):
                self.flow.stored(trajectory, version=version, tokens=1, nbytes=10)

    @rule(random=RANDOM)
    def try_again(self, random: Random) -> None:
        """The episode failed after its tokens were done, or on its instance."""
        if (trajectory := self.pick(random, "waiting", "generated")) is not None:
            self.place(trajectory)

    @rule(random=RANDOM)
    def place_unplaced(self, random: Random) -> None:
        if unplaced := self.flow.unplaced():
            self.place(random.choice(unplaced))

    def place(self, trajectory: int) -> None:
        instance = self.flow.place_again(trajectory)
        self.rows[trajectory].state = "waiting"
        if instance is None:
            assert trajectory in self.flow.unplaced()
        else:
            assert self.rows[trajectory].version in self.nodes[instance].versions
            assert self.flow.instance_of(trajectory) == instance

    @rule(random=RANDOM)
    def place_settled(self, random: Random) -> None:
        if (trajectory := self.pick(random, "stored", "trained", "dropped")) is not None:
            assert self.flow.place_again(trajectory) is None
            assert trajectory not in self.flow.unplaced()

    @rule(random=RANDOM, reason=st.sampled_from(["failed", "timed out"]))
    def drop(self, random: Random, reason: str) -> None:
        found = self.groups(complete=False) + self.groups(complete=True)
        if not found:
            return
        group = random.choice(sorted(found))
        assert self.flow.drop_group(group, reason) == tuple(self.members(group))
        assert self.flow.drop_group(group, reason) == ()
        for trajectory in self.members(group):
            self.rows[trajectory].state = "dropped"
        self.dropped[reason] += self.group

    # ------------------------------------------------------------ instances

    @precondition(lambda self: len(self.nodes) < len(NAMES))
    @rule(slots=st.integers(1, 4), live_versions=st.integers(1, 4), hosts=st.booleans())
    def join(self, slots: int, live_versions: int, hosts: bool) -> None:
        name = next(name for name in NAMES if name not in self.nodes)
        versions = {self.version} if hosts else set()
        self.flow.join(name, slots=slots, live_versions=live_versions, versions=versions)
        self.nodes[name] = Node(slots, live_versions, versions)
        with pytest.raises(ValueError, match="known already"):
            self.flow.join(name, slots=1, live_versions=1, versions=())

    @precondition(lambda self: self.nodes)
    @rule(random=RANDOM)
    def leave(self, random: Random) -> None:
        name = random.choice(sorted(self.nodes))
        placed = tuple(t for t in sorted(self.rows) if self.flow.instance_of(t) == name)
        assert self.flow.leave(name) == placed
        assert set(placed) <= set(self.flow.unplaced())
        del self.nodes[name]

    @rule(random=RANDOM)
    def switch(self, random: Random) -> None:
        if switches := self.flow.switches():
            self.carry_out(random.choice(switches))

    def carry_out(self, switch: Switch) -> None:
        node = self.nodes[switch.instance]
        for version in switch.retire:
            assert version in node.versions
            assert self.flow.retired_on(switch.instance, version) == ()
            node.versions.remove(version)
        if switch.load is not None:
            assert switch.load in self.flow.live_versions()
            assert self.flow.committed(switch.instance, switch.load) == ()
            node.versions.add(switch.load)
        assert len(node.versions) <= node.live_versions

    @precondition(lambda self: any(node.versions for node in self.nodes.values()))
    @rule(random=RANDOM)
    def lose_a_version(self, random: Random) -> None:
        """An instance drops a version unasked, as after a restart of its engine."""
        name = random.choice(sorted(name for name, node in self.nodes.items() if node.versions))
        version = random.choice(sorted(self.nodes[name].versions))
        displaced = self.flow.retired_on(name, version)
        assert set(displaced) <= set(self.flow.unplaced())
        assert all(self.rows[trajectory].version == version for trajectory in displaced)
        self.nodes[name].versions.remove(version)

    # ------------------------------------------------------------ batches and versions

    @rule()
    def take(self) -> None:
        self.now += 1.0
        lease = self.flow.take_batch(now=self.now, ttl=10.0)
        if lease is None:
            return
        assert self.lease is None
        assert not self.batch_trained
        assert lease.version == self.version
        assert lease.rows == tuple(t for group in lease.groups for t in self.members(group))
        assert lease.rows == lease.tokens == tuple(sorted(lease.rows))
        assert len(lease.groups) == self.batch
        assert all(self.rows[t].state == "stored" for t in lease.rows)
        versions = {group: self.rows[group * self.group].version for group in lease.groups}
        assert all(0 <= self.version - version <= self.policy.max_staleness for version in versions.values())
        left = self.groups(complete=True)
        self.lease = lease
        oldest_left = min(((self.rows[g * self.group].version, g) for g in left if g not in lease.groups), default=None)
        assert oldest_left is None or max((v, g) for g, v in versions.items()) < oldest_left

    @precondition(lambda self: self.lease is not None)
    @rule(how=st.sampled_from(["release", "expire", "extend"]))
    def give_back(self, how: str) -> None:
        lease = self.lease
        assert lease is not None
        self.now = lease.deadline
        if how == "extend":
            self.flow.extend(lease.lease, now=self.now, ttl=1.0)
            assert self.flow.expire(self.now) == ()
            self.now += 1.0
            assert [expired.lease for expired in self.flow.expire(self.now)] == [lease.lease]
        elif how == "expire":
            assert self.flow.expire(self.now - 0.5) == ()
            assert self.flow.expire(self.now) == (lease,)
        else:
            self.flow.release(lease.lease)
        self.lease = None
        with pytest.raises(ValueError, match="not held"):
            self.flow.trained(lease.lease)

    @precondition(lambda self: self.lease is not None)
    @rule(applied=st.sampled_from([True, True, True, False]))
    def train(self, applied: bool) -> None:
        lease = self.lease
        assert lease is not None
        with pytest.raises(ValueError, match="on lease"):
            self.flow.drop_group(lease.groups[0], "failed")
        assert self.flow.trained(lease.lease, applied=applied) == lease.rows
        for trajectory in lease.rows:
            assert self.rows[trajectory].state == "stored"
            self.rows[trajectory].state = "trained"
        self.lease, self.batch_trained = None, applied
        self.batches += 1

    @rule(off=st.sampled_from([-1, 0, 2]))
    def publish_out_of_turn(self, off: int) -> None:
        with pytest.raises(StalenessError):
            self.flow.published(self.version + off)

    @rule()
    def publish(self) -> None:
        if not self.flow.may_publish():
            with pytest.raises(StalenessError):
                self.flow.published(self.version + 1)
            return
        assert self.batch_trained
        self.version += 1
        self.flow.published(self.version)
        self.batch_trained = False
        oldest = self.version - self.policy.max_staleness
        assert all(version > oldest for version in self.flow.view().in_flight)

    @rule()
    def retire(self) -> None:
        for version in self.flow.retirable():
            assert version != self.version
            assert not self.pins[version]
            assert version not in self.flow.view().in_flight
            self.flow.retired(version)
        assert set(self.flow.live_versions()) == {self.version, *self.flow.view().in_flight, *+self.pins}

    @rule(random=RANDOM)
    def pin(self, random: Random) -> None:
        version = random.choice(self.flow.live_versions())
        self.flow.pin(version)
        self.pins[version] += 1

    @precondition(lambda self: +self.pins)
    @rule(random=RANDOM)
    def unpin(self, random: Random) -> None:
        version = random.choice(sorted(+self.pins))
        self.flow.unpin(version)
        self.pins[version] -= 1

    # ------------------------------------------------------------ many of these at once

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 80), calm=st.booleans())
    def a_while(self, seed: int, count: int, calm: bool) -> None:
        """Deep states: single events drawn by hypothesis rarely get past the first batch."""
        random = Random(seed)
        usual = [self.ticket, self.take, self.publish, self.retire]
        drawn = [self.generate, self.store, self.store, self.store, self.switch, self.switch, self.place_unplaced]
        rare = [self.try_again, self.store_again_or_late, self.pin]
        for _ in range(count):
            event = random.choice([*usual, *usual, self.ticket, self.ticket, *drawn, *([] if calm else rare)])
            event() if event in usual else event(random)
            if self.lease is not None and random.random() < 0.5:
                self.train(applied=random.random() < 0.9)
            if +self.pins and random.random() < 0.3:
                self.unpin(random)
            if not calm and random.random() < 0.02:
                self.drop(random, "failed")
            if not calm and self.nodes and random.random() < 0.02:
                self.leave(random)
            if random.random() < 0.2:
                self.check()

    # ------------------------------------------------------------ what always holds

    def check(self) -> None:
        self.nothing_is_lost_or_counted_twice()
        self.the_policy_sees_the_truth()
        self.every_trajectory_is_where_its_version_is()
        self.no_switch_takes_a_version_from_somebody()

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        if not hasattr(self, "flow"):
            return
        counts, states = self.flow.counts(), Counter(row.state for row in self.rows.values())
        assert counts.dispatched == len(self.rows)
        assert counts.trained == states["trained"]
        assert counts.buffered == states["stored"]
        assert counts.in_flight == states["waiting"] + states["generated"]
        assert counts.dropped == dict(self.dropped)
        assert counts.refused == dict(self.refused)
        assert counts.dispatched == (counts.trained + counts.buffered + counts.in_flight + sum(counts.dropped.values()))
        assert self.flow.nbytes == 10 * counts.buffered

    @invariant()
    def the_policy_sees_the_truth(self) -> None:
        if not hasattr(self, "flow"):
            return
        view = self.flow.view()
        in_flight, ready = self.groups(complete=False), self.groups(complete=True)
        assert view.version == self.version
        assert view.batch_taken == (self.batch_trained or self.lease is not None)
        assert view.in_flight == Counter(self.rows[group * self.group].version for group in in_flight)
        assert view.ready == Counter(self.rows[group * self.group].version for group in ready)
        assert len(view.in_flight) <= max(self.policy.max_staleness, 1)
        could_publish = self.flow.may_publish()
        assert could_publish or not self.could_publish or not self.batch_trained
        self.could_publish = could_publish

    @invariant()
    def every_trajectory_is_where_its_version_is(self) -> None:
        if not hasattr(self, "flow"):
            return
        load: Counter[str] = Counter()
        for trajectory, row in self.rows.items():
            instance = self.flow.instance_of(trajectory)
            assert not instance or row.state == "waiting"
            if instance:
                assert row.version in self.nodes[instance].versions
                load[instance] += 1
        waiting = {t for t, row in self.rows.items() if row.state == "waiting"}
        assert set(self.flow.unplaced()) == {t for t in waiting if not self.flow.instance_of(t)}
        if not self.policy.lockstep:
            assert all(load[name] < self.capacity(name) for name in load)
        for name, node in self.nodes.items():
            assert all(name in self.flow.hosting(version) for version in node.versions)

    @invariant()
    def no_switch_takes_a_version_from_somebody(self) -> None:
        if not hasattr(self, "flow"):
            return
        for switch in self.flow.switches():
            for version in switch.retire:
                assert not self.pins[version]
                assert not any(
                    self.flow.instance_of(t) == switch.instance and row.version == version
                    for t, row in self.rows.items()
                )
        assert self.flow.switches() == self.flow.switches()

    # ------------------------------------------------------------ it always gets further

    def teardown(self) -> None:
        if not hasattr(self, "flow"):
            return
        for version in list(self.pins.elements()):
            self.flow.unpin(version)
        self.pins.clear()
        if not self.nodes:
            self.join(slots=1, live_versions=1, hosts=False)
        wanted = self.batches + 2 * (self.policy.max_staleness + 2)
        for _ in range(40 * wanted):
            if self.batches >= wanted:
                break
            self.complete_everything()
        assert self.batches >= wanted, f"stuck at {self.flow.view()} with {self.flow.switches()}"
        if self.lease is not None:
            self.lease = None
        groups = self.flow.drop_all("run_ended")
        assert all(not self.flow.knows(group) for group in groups)
        counts = self.flow.counts()
        assert counts.in_flight == counts.buffered == self.flow.nbytes == 0
        assert counts.dispatched == counts.trained + sum(counts.dropped.values())

    def complete_everything(self) -> None:
        for switch in self.flow.switches():
            self.carry_out(switch)
        for trajectory in self.flow.unplaced():
            self.place(trajectory)
        while (before := len(self.rows)) is not None:
            self.ticket()
            if len(self.rows) == before:
                break
        for trajectory, row in self.rows.items():
            if row.state == "generated" or (row.state == "waiting" and self.flow.instance_of(trajectory)):
                assert self.flow.stored(trajectory, version=row.version, tokens=trajectory, nbytes=10)
                row.state = "stored"
        self.take()
        if self.lease is not None:
            self.train(applied=True)
        self.publish()
        self.retire()


FlowMachine.TestCase.settings = settings(
    max_examples=40,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
TestFlowKeepsItsInvariants = FlowMachine.TestCase
