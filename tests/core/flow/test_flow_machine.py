"""The whole flow under random interleavings, against a plain model that keeps every trajectory as an object.

Tickets, completions, duplicates, late writes, instances that join, leave, switch and lose versions, retries, leases
that expire, skipped batches, publishes, pins and drops come in any order; after each the invariants must hold, and
from wherever that ends, a driver that merely completes everything must always get further.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from random import Random
from typing import Any

import pytest
from hypothesis import HealthCheck
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.contract import StalenessPolicy
from headrace.errors import StalenessError
from headrace.flow import BatchLease, Flow
from support.flow_instances import NAMES, Instances
from support.flow_model import POLICIES, Node, Trajectory, come_back, most_in_flight
from support.profiles import machine

LOOKAHEAD = 1.25
Pair = tuple[int, int]
RANDOM = st.randoms(use_true_random=False)


class FlowMachine(Instances, RuleBasedStateMachine):
    @initialize(
        policy=st.sampled_from(POLICIES),
        sizes=st.tuples(st.integers(1, 3), st.integers(1, 3)),
        first=st.tuples(st.integers(0, 5), st.integers(0, 3)),
        live_versions=st.lists(st.integers(1, 4), min_size=1, max_size=2),
        past=st.tuples(st.integers(0, 2**32), st.sampled_from([200, 50, 0])),
    )
    def begin(self, policy: StalenessPolicy, sizes: Pair, first: Pair, live_versions: list[int], past: Pair) -> None:
        self.policy, (self.batch, self.group), (self.first, self.version) = policy, sizes, first
        self.flow = self.new_flow(first_group=self.first, version=self.version)
        self.rows: dict[int, Trajectory] = {}
        self.nodes: dict[str, Node] = {}
        self.draining: set[str] = set()
        self.dropped: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.pins: Counter[int] = Counter()
        self.lease: BatchLease | None = None
        self.batch_trained = self.could_publish = False
        self.now = self.batches = 0
        for places in live_versions:
            self.join(4, live_versions=places, hosts=True)
        self.a_while(seed=past[0], count=past[1])

    def new_flow(self, **start: Any) -> Flow:
        sizes = {"batch_groups": self.batch, "group_size": self.group}
        return Flow(policy=self.policy, lookahead=LOOKAHEAD, **sizes, **start)

    # ------------------------------------------------------------ the model

    def pick(self, random: Random, *states: str) -> int | None:
        found = [t for t, row in self.rows.items() if row.state in states]
        return random.choice(found) if found else None

    def members(self, group: int) -> range:
        return range(group * self.group, (group + 1) * self.group)

    def groups(self, *, complete: bool) -> list[int]:
        """Outstanding groups that are not on lease."""
        leased = self.lease.groups if self.lease else ()
        states: dict[int, set[str]] = {}
        for trajectory, row in self.rows.items():
            states.setdefault(trajectory // self.group, set()).add(row.state)
        return [
            group
            for group, found in states.items()
            if not found & {"trained", "dropped"} and group not in leased and (found == {"stored"}) == complete
        ]

    def version_of(self, group: int) -> int:
        return self.rows[group * self.group].version

    def oldest_of(self, group: int) -> int:
        return min(self.rows[trajectory].oldest for trajectory in self.members(group))

    # ------------------------------------------------------------ trajectories

    @rule()
    def ticket(self) -> None:
        ticket = self.flow.next_ticket()
        if ticket is None:
            return
        assert ticket.version == self.version
        assert ticket.trajectories == tuple(self.members(ticket.group))
        for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
            assert trajectory not in self.rows
            assert instance or self.policy.lockstep
            assert instance not in self.draining or self.policy.lockstep
            self.rows[trajectory] = Trajectory(version=self.version, under=self.version, oldest=self.version)

    @rule(random=RANDOM)
    def generate(self, random: Random) -> None:
        if (trajectory := self.pick(random, "waiting")) is not None:
            self.flow.generated(trajectory)
            self.rows[trajectory].state = "generated"

    @rule(random=RANDOM)
    def store(self, random: Random) -> None:
        if (trajectory := self.pick(random, "waiting", "generated")) is not None:
            self.finish(trajectory)

    def finish(self, trajectory: int) -> None:
        row = self.rows[trajectory]
        assert self.flow.stored(trajectory, version=row.oldest, tokens=trajectory, nbytes=10)
        row.state = "stored"

    @rule(random=RANDOM)
    def store_again_or_late(self, random: Random) -> None:
        if (trajectory := self.pick(random, "stored", "trained", "dropped")) is not None:
            row = self.rows[trajectory]
            assert not self.flow.stored(trajectory, version=row.oldest, tokens=1, nbytes=10)
            known = trajectory // self.group >= self.first
            self.refused["duplicate" if row.state == "stored" else "late" if known else "unknown"] += 1
            assert self.flow.place_again(trajectory) is None

    @rule(random=RANDOM)
    def try_again(self, random: Random) -> None:
        """The episode failed after its tokens were done, or on its instance."""
        if (trajectory := self.pick(random, "waiting", "generated")) is not None:
            self.place(trajectory)

    @rule()
    def place_unplaced(self) -> None:
        for trajectory in self.flow.unplaced():
            self.place(trajectory)

    def place(self, trajectory: int) -> None:
        instance = self.flow.place_again(trajectory)
        row = self.rows[trajectory]
        row.state = "waiting"
        assert self.flow.instance_of(trajectory) == (instance or "")
        row.under = row.oldest = self.flow.version_of(trajectory)
        assert row.under == row.version or self.policy.interruption is not None
        assert row.under >= row.version

    @rule(random=RANDOM)
    def drop(self, random: Random) -> None:
        if not (found := self.groups(complete=False) + self.groups(complete=True)):
            return
        group, reason = random.choice(found), random.choice(["failed", "timed out"])
        assert self.flow.drop_group(group, reason) == tuple(self.members(group))
        assert self.flow.drop_group(group, reason) == ()
        for trajectory in self.members(group):
            self.rows[trajectory].state = "dropped"
        self.dropped[reason] += self.group

    # ------------------------------------------------------------ batches and versions

    @rule()
    def take(self) -> None:
        self.now += 1
        lease = self.flow.take_batch(now=self.now, ttl=10.0)
        if lease is None:
            return
        assert self.lease is None
        assert not self.batch_trained
        assert lease.version == self.version
        assert len(lease.groups) == self.batch
        assert lease.rows == lease.tokens == tuple(t for group in lease.groups for t in self.members(group))
        assert all(self.rows[t].state == "stored" for t in lease.rows)
        taken = {(self.oldest_of(group), group) for group in lease.groups}
        assert all(0 <= self.version - version <= self.policy.max_staleness for version, _ in taken)
        left = {(self.oldest_of(group), group) for group in self.groups(complete=True)} - taken
        assert not left or max(taken)[0] <= min(left)[0], "oldest version first"
        self.lease = lease

    @rule(random=RANDOM)
    def give_back(self, random: Random) -> None:
        if (lease := self.lease) is None:
            return
        self.lease = None
        if random.random() < 0.5:
            self.flow.release(lease.lease)
        else:
            assert self.flow.expire(lease.deadline - 0.5) == ()
            self.now = lease.deadline
            assert [expired.lease for expired in self.flow.expire(self.now)] == [lease.lease]
        with pytest.raises(ValueError, match="not held"):
            self.flow.trained(lease.lease)

    @rule(applied=st.sampled_from([True, True, True, False]))
    def train(self, applied: bool) -> None:
        if (lease := self.lease) is None:
            return
        with pytest.raises(ValueError, match="in the batch"):
            self.flow.drop_group(lease.groups[0], "failed")
        assert self.flow.trained(lease.lease, applied=applied) == lease.rows
        for trajectory in lease.rows:
            assert self.rows[trajectory].state == "stored"
            self.rows[trajectory].state = "trained"
        self.lease, self.batch_trained = None, applied
        self.batches += 1

    @rule()
    def publish(self) -> None:
        if not self.flow.may_publish():
            with pytest.raises(StalenessError):
                self.flow.published(self.version + 1)
            return
        assert self.batch_trained
        self.version += 1
        self.flow.published(self.version)
        self.batch_trained = self.could_publish = False
        oldest = self.version - most_in_flight(self.policy)
        assert all(version > oldest for version in self.flow.view().in_flight)

    @rule()
    def resume(self) -> None:
        """Everything is gone but a state kept between batches: what was unfinished starts anew, first of all."""
        if self.lease is not None or self.batch_trained:
            with pytest.raises(ValueError, match="between batches"):
                self.flow.state()
            return
        state = self.flow.state()
        assert [group.group for group in state.stored] == sorted(self.groups(complete=True))
        for trajectory in [t for group in self.groups(complete=False) for t in self.members(group)]:
            assert trajectory // self.group in state.unfinished
            del self.rows[trajectory]
        self.flow, self.first = self.new_flow(state=state), state.first_group
        come_back(self.flow, self.rows)
        for forgotten in (self.nodes, self.draining, self.pins, self.refused):
            forgotten.clear()
        self.could_publish = False
        assert self.flow.state() == state

    @rule()
    def retire(self) -> None:
        for version in self.flow.retirable():
            self.flow.retired(version)
        in_use: Iterable[int] = self.flow.view().in_flight
        if self.policy.interruption is not None:
            in_use = (row.under for trajectory, row in self.rows.items() if self.flow.instance_of(trajectory))
        assert set(self.flow.live_versions()) == {self.version, *in_use, *+self.pins}

    @rule(random=RANDOM)
    def pin(self, random: Random) -> None:
        version = random.choice(self.flow.live_versions())
        self.flow.pin(version)
        self.pins[version] += 1

    @rule(random=RANDOM)
    def unpin(self, random: Random) -> None:
        if pinned := sorted(+self.pins):
            version = random.choice(pinned)
            self.flow.unpin(version)
            self.pins[version] -= 1

    @rule(seed=st.integers(0, 2**32), count=st.integers(1, 80))
    def a_while(self, seed: int, count: int) -> None:
        """Deep states: single events drawn by hypothesis rarely get past the first batch."""
        random = Random(seed)
        calm = random.random() < 0.3
        usual = [
            self.ticket,
            self.ticket,
            self.take,
            self.publish,
            self.retire,
            self.place_unplaced,
            self.leave_drained,
        ]
        drawn = [self.generate, self.store, self.store, self.store, self.switch, self.switch, self.unpin]
        rare = [self.try_again, self.store_again_or_late, self.pin]
        trouble = [self.drop, self.leave, self.lose_a_version, self.give_back, self.come, self.drain]
        trouble.append(lambda _: self.resume())
        for _ in range(count):
            event = random.choice([*usual, *usual, *drawn, *([] if calm else rare)])
            event() if event in usual else event(random)
            if random.random() < 0.5:
                self.train(applied=random.random() < 0.9)
            if not calm and random.random() < 0.05:
                random.choice(trouble)(random)
            if random.random() < 0.2:
                self.nothing_is_lost_or_counted_twice()
                self.the_policy_sees_the_truth()
                self.every_trajectory_is_where_its_version_is()
                self.no_switch_takes_a_version_from_somebody()

    # ------------------------------------------------------------ what always holds

    @invariant()
    def nothing_is_lost_or_counted_twice(self) -> None:
        counts, states = self.flow.counts(), Counter(row.state for row in self.rows.values())
        assert counts.dispatched == len(self.rows)
        assert counts.trained == states["trained"]
        assert counts.buffered == states["stored"]
        assert counts.in_flight == states["waiting"] + states["generated"]
        assert counts.dropped == dict(self.dropped)
        assert counts.refused == dict(self.refused)
        assert counts.dispatched == counts.trained + counts.buffered + counts.in_flight + sum(counts.dropped.values())
        assert self.flow.nbytes == 10 * counts.buffered

    @invariant()
    def the_policy_sees_the_truth(self) -> None:
        view = self.flow.view()
        assert view.version == self.version
        assert view.batch_taken == (self.batch_trained or self.lease is not None)
        assert view.last_part == view.batch_taken * self.batch, "this trainer takes no parts"
        assert view.in_flight == Counter(map(self.version_of, self.groups(complete=False)))
        assert view.ready == Counter(map(self.oldest_of, self.groups(complete=True)))
        assert len(view.in_flight) <= most_in_flight(self.policy)
        could_publish = self.flow.may_publish()
        assert could_publish or not self.could_publish, "what may be published stays so"
        self.could_publish = could_publish

    @invariant()
    def every_trajectory_is_where_its_version_is(self) -> None:
        load: Counter[str] = Counter()
        for trajectory, row in self.rows.items():
            if instance := self.flow.instance_of(trajectory):
                assert row.state == "waiting"
                assert row.under == self.flow.version_of(trajectory)
                assert row.under in self.nodes[instance].versions
                assert self.policy.interruption is None or row.under == max(self.nodes[instance].versions)
                load[instance] += 1
        waiting = {t for t, row in self.rows.items() if row.state == "waiting"}
        assert set(self.flow.unplaced()) == {t for t in waiting if not self.flow.instance_of(t)}
        for name, node in self.nodes.items():
            assert self.policy.lockstep or load[name] < node.slots * LOOKAHEAD + self.group
            assert all(name in self.flow.hosting(version) for version in node.versions)

    @invariant()
    def no_switch_takes_a_version_from_somebody(self) -> None:
        busy = {(self.flow.instance_of(t), row.under) for t, row in self.rows.items()}
        for switch in self.flow.switches():
            assert not any(self.pins[version] or (switch.instance, version) in busy for version in switch.retire)

    # ------------------------------------------------------------ it always gets further

    def teardown(self) -> None:
        if not hasattr(self, "flow"):
            return
        while +self.pins:
            self.unpin(Random(0))
        if not self.nodes.keys() - self.draining:
            if len(self.nodes) == len(NAMES):
                self.leave(Random(0))
            self.join(1, live_versions=1, hosts=False)
        wanted = self.batches + 2 * (self.policy.max_staleness + 2)
        for _ in range(40 * wanted):
            if self.batches < wanted:
                self.complete_everything()
        assert self.batches >= wanted, f"stuck at {self.flow.view()} with {self.flow.switches()}"
        assert not self.draining, "who drains leaves in the end"
        assert not any(map(self.flow.knows, self.flow.drop_all("run_ended")))
        counts = self.flow.counts()
        assert counts.in_flight == counts.buffered == self.flow.nbytes == 0
        assert counts.dispatched == counts.trained + sum(counts.dropped.values())

    def complete_everything(self) -> None:
        for switch in self.flow.switches():
            self.carry_out(switch)
        self.place_unplaced()
        self.leave_drained()
        before = -1
        while len(self.rows) > before:
            before = len(self.rows)
            self.ticket()
        for trajectory, row in self.rows.items():
            if row.state == "generated" or (row.state == "waiting" and self.flow.instance_of(trajectory)):
                self.finish(trajectory)
        self.take()
        self.train(applied=True)
        self.publish()
        self.retire()


FlowMachine.TestCase.settings = machine(examples=40, steps=30, suppress_health_check=list(HealthCheck))
TestFlowKeepsItsInvariants = FlowMachine.TestCase
