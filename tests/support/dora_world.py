"""A small cluster around the flow, in which every token is really sampled: by an instance, from a version it has.

What happens next is drawn at random: decoding, scoring, failures, joins, losses, switches half done, moves that come
too late, memory that runs out, batches given back. The world keeps its own books and never looks inside the flow.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from random import Random
from typing import TypeVar

from headrace.contract import StalenessPolicy
from headrace.flow import BatchLease, Flow, Move
from headrace.flow.records import Switch

T = TypeVar("T")
LOOKAHEAD = 1.25
PROMPT = 3
"""Tokens of every prompt."""
PROMPTS = 5


@dataclass
class Replica:
    """An inference engine."""

    slots: int
    live_versions: int
    migrates: bool
    versions: set[int]
    running: dict[int, None] = field(default_factory=dict)
    """Trajectories, in the order in which they came."""
    kv_used: float = 0.0


@dataclass
class Stream:
    """An unfinished trajectory, or one that is stored."""

    version: int
    """Of its group."""
    length: int
    tokens: list[tuple[int, int]] = field(default_factory=list)
    """(version, token)."""
    state: str = "waiting"
    """waiting → generated → stored → trained; or dropped."""
    computed_again: int = 0
    """Tokens that moves had computed once more."""
    under: int = -1
    """The version that samples its next token."""

    @property
    def oldest(self) -> int:
        """The version of its oldest token."""
        return min(version for version, _ in self.tokens)


def token(trajectory: int, position: int, version: int) -> int:
    """What a version samples: a function of the request's seed, of what came before and of the weights."""
    return hash((trajectory, position, version)) % 1000


class World:
    """``length``: of a trajectory, in tokens. ``calm``: nothing is lost, given back or dropped. ``observant``: groups
    start in the order of lengths that were observed."""

    def __init__(
        self,
        policy: StalenessPolicy,
        *,
        batch_groups: int,
        group_size: int,
        replicas: list[tuple[int, int, bool]],
        seed: int,
        length: Callable[[Random], int],
        calm: bool = False,
        observant: bool = False,
        streaming: bool = False,
    ) -> None:
        """``replicas``: slots, live versions and whether it migrates, of each instance at the start. ``streaming``:
        batches are taken in parts."""
        self.policy, self.batch_groups, self.group_size, self.streaming = policy, batch_groups, group_size, streaming
        self.random, self.length, self.calm = Random(seed), length, calm
        self.flow = Flow(
            policy=policy,
            batch_groups=batch_groups,
            group_size=group_size,
            lookahead=LOOKAHEAD,
            prompt=(lambda group: group % PROMPTS) if observant else None,
        )
        self.streams: dict[int, Stream] = {}
        self.replicas: dict[str, Replica] = {}
        self.dropped: Counter[str] = Counter()
        self.draining: set[str] = set()
        self.loading: dict[str, int] = {}
        """Instances that have retired what a switch said and not loaded yet."""
        self.lease: BatchLease | None = None
        self.version = self.trained = self.joins = self.steps = 0
        self.staleness: list[int] = []
        self.batches: list[tuple[int, ...]] = []
        self.interrupts = policy.interruption is not None
        self.interrupted = 0
        """Answers that went on under another version."""
        self.moved = Counter[bool]()
        """Moves carried out, by whether the state went along."""
        for slots, live_versions, migrates in replicas:
            self.join(slots, live_versions, migrates)

    # ------------------------------------------------------------ what may happen

    def step(self) -> None:
        """One thing happens."""
        self.steps += 1
        usual = [self.start, self.decode, self.decode, self.decode, self.score, self.switch, self.load, self.move]
        usual += [self.place, self.take, self.train, self.publish, self.retire, self.timer, self.measure]
        usual.append(self.leave_drained)
        trouble = [
            self.come,
            self.drain,
            self.lose,
            self.fail,
            self.give_back,
            self.drop,
            self.call_off,
            self.forget_version,
        ]
        troubled = not self.calm and self.random.random() < 0.04
        self.random.choice(trouble if troubled else usual)()

    def start(self) -> None:
        while (ticket := self.flow.next_ticket()) is not None:
            for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
                assert trajectory not in self.streams
                assert instance not in self.draining
                self.streams[trajectory] = Stream(ticket.version, self.length(self.random))
                self.begin(trajectory, instance)

    def begin(self, trajectory: int, instance: str) -> None:
        stream = self.streams[trajectory]
        stream.under = self.flow.version_of(trajectory)
        assert stream.under in self.replicas[instance].versions
        assert stream.under == stream.version or self.interrupts
        self.replicas[instance].running[trajectory] = None

    def decode(self) -> None:
        for name in self.any(self.replicas):
            self.decode_on(name)

    def decode_on(self, name: str) -> None:
        """One instance decodes for a while; it would fail a request whose version it has not."""
        replica = self.replicas[name]
        for trajectory in list(replica.running)[: replica.slots]:
            stream = self.streams[trajectory]
            assert stream.under in replica.versions, "a request for a version that is not there"
            for _ in range(self.random.randint(1, 4)):
                if len(stream.tokens) < stream.length:
                    stream.tokens.append((stream.under, token(trajectory, len(stream.tokens), stream.under)))
            if len(stream.tokens) == stream.length:
                del replica.running[trajectory]
                stream.state = "generated"
                self.flow.generated(trajectory)

    def score(self) -> None:
        for trajectory in self.of("generated")[:3]:
            stream = self.streams[trajectory]
            assert self.flow.stored(trajectory, version=stream.oldest, tokens=stream.length, nbytes=stream.length)
            stream.state = "stored"

    def place(self) -> None:
        for trajectory in self.flow.unplaced():
            if instance := self.flow.place_again(trajectory):
                self.begin(trajectory, instance)

    # ------------------------------------------------------------ instances

    def come(self) -> None:
        if len(self.replicas) < 6:
            self.join(self.random.randint(1, 4), self.random.randint(1, 3), self.random.random() < 0.5)

    def join(self, slots: int, live_versions: int, migrates: bool) -> None:
        name, versions = f"i{self.joins}", {self.version} if self.random.random() < 0.7 else set()
        self.joins += 1
        self.flow.join(name, slots=slots, live_versions=live_versions, versions=versions, migrates=migrates)
        self.replicas[name] = Replica(slots, live_versions, migrates, versions)

    def lose(self) -> None:
        for name in self.any(self.replicas):
            self.forget(name)
            self.lost(self.flow.leave(name))

    def forget(self, name: str) -> None:
        del self.replicas[name]
        self.loading.pop(name, None)
        self.draining.discard(name)

    def drain(self) -> None:
        for name in self.any(self.replicas):
            self.draining.add(name)
            self.flow.drain(name)

    def leave_drained(self) -> None:
        for name in self.flow.drained():
            assert name in self.draining
            assert not self.replicas[name].running, "drained, never cut"
            assert self.flow.leave(name) == ()
            self.forget(name)

    def lost(self, trajectories: tuple[int, ...]) -> None:
        """What they had is gone: they begin anew."""
        for trajectory in trajectories:
            self.streams[trajectory].tokens.clear()

    def forget_version(self) -> None:
        """An engine restarts without one of its versions."""
        for name in self.any({n: r for n, r in self.replicas.items() if r.versions}):
            replica = self.replicas[name]
            version = self.random.choice(sorted(replica.versions))
            replica.versions.remove(version)
            displaced = self.flow.retired_on(name, version)
            for trajectory in displaced:
                del replica.running[trajectory]
            self.lost(displaced)

    def switch(self) -> None:
        for switch in self.any(self.flow.switches()):
            self.carry_out(switch)

    def carry_out(self, switch: Switch) -> None:
        replica = self.replicas[switch.instance]
        assert switch.instance not in self.loading, "it is at another switch"
        for version in switch.retire:
            assert not any(self.streams[t].under == version for t in replica.running)
            replica.versions.remove(version)
            assert self.flow.retired_on(switch.instance, version) == ()
        if switch.load is not None:
            assert switch.instance not in self.draining
            self.loading[switch.instance] = switch.load
            self.flow.switch_begun(switch.instance)

    def load(self) -> None:
        for name in self.any(self.loading):
            version, replica = self.loading.pop(name), self.replicas[name]
            if version in self.flow.live_versions():  # else it was overtaken, and retired meanwhile
                self.commit(name, replica, version)
            self.flow.switch_ended(name)

    def commit(self, name: str, replica: Replica, version: int) -> None:
        if self.interrupts:
            self.interrupt(replica, version)
        if len(replica.versions) < replica.live_versions:
            replica.versions.add(version)
            assert self.flow.committed(name, version) == ()

    def interrupt(self, replica: Replica, version: int) -> None:
        """All that is in the middle of an answer goes on under a version that is about to be committed."""
        if replica.live_versions == 1:
            replica.versions.clear()
        for trajectory in replica.running:
            stream = self.streams[trajectory]
            assert version > stream.under
            stream.under = version
            self.interrupted += bool(stream.tokens)

    def measure(self) -> None:
        """The share of KV memory in use, which now and then is too much."""
        for name in self.any(self.replicas):
            self.replicas[name].kv_used = self.random.choice([0.2, 0.5, 0.8, 0.8, 1.0])
            self.flow.kv_used(name, self.replicas[name].kv_used)

    # ------------------------------------------------------------ moves

    def timer(self) -> None:
        self.flow.rebalance()

    def moves(self) -> tuple[Move, ...]:
        return self.flow.moves(lambda trajectory: PROMPT + len(self.streams[trajectory].tokens))

    def move(self) -> None:
        for move in self.any(self.moves()):
            self.hand_over(move)

    def hand_over(self, move: Move) -> None:
        source, target, stream = self.replicas[move.source], self.replicas[move.target], self.streams[move.trajectory]
        assert move.version == stream.version
        assert move.with_state == (source.migrates and target.migrates)
        del source.running[move.trajectory]
        if not move.with_state:
            stream.computed_again += PROMPT + len(stream.tokens)
        assert self.flow.moved(move.trajectory)
        self.begin(move.trajectory, move.target)
        self.moved[move.with_state] += 1

    def call_off(self) -> None:
        for move in self.any(self.moves()):
            self.flow.stays(move.trajectory)
            assert self.flow.instance_of(move.trajectory) == move.source

    # ------------------------------------------------------------ trouble

    def fail(self) -> None:
        """A trajectory's scoring fails: it is generated anew."""
        for trajectory in self.of("generated")[:1]:
            stream = self.streams[trajectory]
            stream.state = "waiting"
            stream.tokens.clear()
            if instance := self.flow.place_again(trajectory):
                self.begin(trajectory, instance)

    def drop(self) -> None:
        groups = {t // self.group_size for t in self.of("waiting", "generated", "stored")}
        for group in self.any({group for group in groups if not self.flow.in_training(group)}):
            for trajectory in self.flow.drop_group(group, "failed"):
                self.streams[trajectory].state = "dropped"
                for replica in self.replicas.values():
                    replica.running.pop(trajectory, None)
            self.dropped["failed"] += self.group_size

    # ------------------------------------------------------------ batches and versions

    def take(self) -> None:
        if self.streaming:
            self.flow.take_part(now=0.0, ttl=1.0)
        if (lease := self.flow.take_batch(now=0.0, ttl=1.0)) is not None:
            self.lease = lease

    def give_back(self) -> None:
        if self.lease is not None:
            self.flow.release(self.lease.lease)
            self.lease = None

    def train(self) -> None:
        if self.lease is not None:
            rows = self.flow.trained(self.lease.lease)
            self.staleness += [self.version - self.streams[row].oldest for row in rows]
            for row in rows:
                self.streams[row].state = "trained"
            self.batches.append(rows)
            self.lease = None

    def publish(self) -> None:
        if self.flow.may_publish():
            self.version += 1
            self.flow.published(self.version)

    def retire(self) -> None:
        for version in self.flow.retirable():
            self.flow.retired(version)

    # ------------------------------------------------------------ what the world knows

    def any(self, things: Iterable[T]) -> list[T]:
        """One of them, or none when there are none."""
        found = list(things)
        return [self.random.choice(found)] if found else []

    def of(self, *states: str) -> list[int]:
        """Trajectories in these states, shuffled."""
        found = [trajectory for trajectory, stream in self.streams.items() if stream.state in states]
        self.random.shuffle(found)
        return found

    def load_of(self, name: str) -> int:
        """Trajectories that an instance has, or is to get."""
        return len(self.replicas[name].running) + sum(move.target == name for move in self.flow.moves())

    # ------------------------------------------------------------ nothing goes wrong any more

    def settle(self) -> None:
        """Everything that can happen without trouble does, once."""
        for name, replica in self.replicas.items():
            if replica.kv_used:
                replica.kv_used = 0.0
                self.flow.kv_used(name, 0.0)
        while self.loading:
            self.load()
        for switch in self.flow.switches():
            self.carry_out(switch)
        while self.loading:
            self.load()
        self.place()
        self.leave_drained()
        self.start()
        for move in self.moves():
            self.hand_over(move)
        for name, replica in self.replicas.items():
            for trajectory in list(replica.running)[: replica.slots]:
                self.streams[trajectory].length = len(self.streams[trajectory].tokens) + 1
            self.decode_on(name)
        while self.of("generated"):
            self.score()
        self.take()
        self.train()
        self.publish()
        self.retire()
