"""The instances of a machine that tries the flow: they join, drain, leave, switch and lose versions."""

from __future__ import annotations

from collections import Counter
from random import Random

from hypothesis import strategies as st
from hypothesis.stateful import rule

from headrace.contract import StalenessPolicy
from headrace.flow import Flow, Switch
from support.flow_model import Node, Trajectory

NAMES = ("a", "b", "c")
RANDOM = st.randoms(use_true_random=False)


class Instances:
    """The rules about them, and what the machine knows of them."""

    flow: Flow
    policy: StalenessPolicy
    version: int
    rows: dict[int, Trajectory]
    nodes: dict[str, Node]
    draining: set[str]
    pins: Counter[int]

    @rule(random=RANDOM)
    def come(self, random: Random) -> None:
        if len(self.nodes) < len(NAMES):
            self.join(random.randint(1, 4), live_versions=random.randint(1, 4), hosts=random.random() < 0.5)

    def join(self, slots: int, *, live_versions: int, hosts: bool) -> None:
        name = next(name for name in NAMES if name not in self.nodes)
        versions = {self.version} if hosts else set()
        self.flow.join(name, slots=slots, live_versions=live_versions, versions=versions)
        self.nodes[name] = Node(slots, live_versions, versions)

    @rule(random=RANDOM)
    def leave(self, random: Random) -> None:
        if not self.nodes:
            return
        name = random.choice(sorted(self.nodes))
        placed = tuple(t for t in sorted(self.rows) if self.flow.instance_of(t) == name)
        assert self.flow.leave(name) == placed
        del self.nodes[name]
        self.draining.discard(name)

    @rule(random=RANDOM)
    def drain(self, random: Random) -> None:
        if self.nodes:
            self.draining.add(name := random.choice(sorted(self.nodes)))
            self.flow.drain(name)

    @rule()
    def leave_drained(self) -> None:
        for name in self.flow.drained():
            assert name in self.draining
            assert not self.nodes[name].versions & (+self.pins).keys()
            assert self.flow.leave(name) == (), "drained, never cut"
            del self.nodes[name]
            self.draining.remove(name)

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
            assert switch.instance not in self.draining
            assert self.flow.committed(switch.instance, switch.load) == ()
            if self.policy.interruption is not None:
                self.interrupt(switch.instance, node, switch.load)
            node.versions.add(switch.load)
        assert len(node.versions) <= node.live_versions

    def interrupt(self, name: str, node: Node, version: int) -> None:
        """What is unfinished there goes on under the version, also where that takes the place of the only other."""
        for trajectory, row in self.rows.items():
            if self.flow.instance_of(trajectory) == name:
                row.under = max(row.under, version)
        if node.live_versions == 1:
            node.versions.clear()

    @rule(random=RANDOM)
    def lose_a_version(self, random: Random) -> None:
        """An instance drops a version unasked, as after a restart of its engine."""
        if hosted := [(name, version) for name, node in self.nodes.items() for version in sorted(node.versions)]:
            name, version = random.choice(hosted)
            displaced = self.flow.retired_on(name, version)
            assert all(self.rows[trajectory].under == version for trajectory in displaced)
            self.nodes[name].versions.remove(version)
