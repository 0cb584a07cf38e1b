"""Which unfinished trajectories should go on elsewhere, under their own version (the orchestration of DORA, arXiv
2604.26256).

A trajectory is a function of its tokens and its version, so that any instance that hosts the version may go on with it.
Two things are worth a move:

* *Consolidation.* The last trajectories of an old version are spread thinly over instances that therefore cannot take
  up the newest one. :func:`partition` says how many hosts each version deserves; those beyond, the emptiest first, hand
  all their trajectories of the version to the others, as long as these have idle slots, and then switch.
* *Relief.* An instance short of memory for KV caches hands its youngest trajectories to instances that are not.
* *Leave-taking.* An instance that drains hands its trajectories to instances with idle slots where that costs nothing;
  nobody hands any to it.

Nobody else moves: a trajectory whose instance keeps its version stays. Decisions are made when something is *due*: a
version was published, a batch was taken, an instance came or went, an instance came under pressure, or the caller's
timer rang. In between, deciding costs nothing.

What a move costs: nothing where both instances can hand over a request's state, else the prompt and the tokens so far
are computed once more. What consolidation gains is the instance's idle slots, for as long as its longest trajectory
would still have taken; of heavy-tailed lengths the best guess is as long as it has taken so far. A token that is
computed again is counted as dear as one that is decoded, which is more than it is.

Invariant: a move is decided once, reserves its place and its version on the target, and stands until it is told as
done or called off, the trajectory finishes, or either instance loses the version.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable

from headrace.flow.fleet import Fleet
from headrace.flow.instances import Instance
from headrace.flow.partition import partition
from headrace.flow.records import Move
from headrace.flow.versions import Versions

Held = Callable[[int], int]
"""Trajectory → tokens in its context now, prompt included."""


class Rebalancing:
    """``top_up``: how many trajectories may start under the newest version."""

    def __init__(self, fleet: Fleet, versions: Versions, *, top_up: Callable[[], int], kv_threshold: float) -> None:
        self.due = False
        """Whether the next :meth:`moves` decides anew."""
        self._fleet = fleet
        self._versions = versions
        self._top_up = top_up
        self._threshold = kv_threshold
        self._members = 0

    def kv_used(self, name: str, share: float) -> None:
        """An instance's KV memory is in use by this share; at the threshold it is full, whatever slots it has."""
        if self._fleet.press(name, share if share >= self._threshold else 0.0):
            self.due = True

    def moves(self, held: Held) -> tuple[Move, ...]:
        """By trajectory; the very same tuple while nothing changes."""
        if self.due or self._members != self._fleet.members:
            self.due, self._members = False, self._fleet.members
            for instance in _by_name(self._fleet.draining):
                self._clear(instance)
            for instance in _by_name(self._fleet.pressed - self._fleet.draining):
                self._relieve(instance, held)
            self._consolidate(held)
        return self._fleet.bound.moves()

    def _relieve(self, instance: Instance, held: Held) -> None:
        """As many leave as are beyond the threshold, if all are alike."""
        placed = [(t, version) for version in instance.unfinished for t in self._fleet.staying_on(instance, version)]
        beyond = math.ceil(instance.load * (1 - self._threshold / instance.pressure)) - (instance.load - len(placed))
        placed.sort(key=lambda found: (held(found[0]), -found[0]))
        for trajectory, version in placed[: max(0, beyond)]:
            target = self._fleet.room(version)
            if target is not None and target.load < target.slots:
                self._fleet.bind(trajectory, version, target)

    def _clear(self, instance: Instance) -> None:
        for version in list(instance.unfinished) if instance.migrates else ():
            for trajectory in self._fleet.staying_on(instance, version):
                target = self._fleet.room(version)
                if target is not None and target.migrates and target.load < target.slots:
                    self._fleet.bind(trajectory, version, target)

    # ------------------------------------------------------------ consolidation

    def _consolidate(self, held: Held) -> None:
        newest, demand = self._versions.newest, self._fleet.demand()
        demand[newest] += self._top_up()
        seats = partition(demand, seats=self._fleet.seats, instances=self._fleet.staying)
        for version in sorted(set(seats) - {newest}):
            self._concentrate(version, seats[version], held)

    def _concentrate(self, version: int, hosts: int, held: Held) -> None:
        """Empty the hosts of a version beyond so many, where that lets them take up the newest version and pays. Who is
        idle on it, or being emptied, neither gives nor takes; who is being filled does not give."""
        if version in self._versions.pinned:
            return  # it stays everywhere
        settled = [i for i in self._fleet.busy(version) if not self._fleet.bound.is_giving(i, version)]
        if len(settled) <= hosts or not any(map(self._is_in_the_way, settled)):
            return
        settled.sort(key=lambda instance: (-len(instance.unfinished[version]), instance.name))
        kept, beyond = settled[:hosts], settled[hosts:]
        idle, with_state = _IdleSlots(kept), all(instance.migrates for instance in kept)
        for source in reversed(beyond):
            if self._fleet.bound.is_taking(source, version) or not self._is_in_the_way(source):
                continue
            leaving = self._fleet.staying_on(source, version)
            if len(leaving) > idle.count:
                break  # the others have more to move
            if _pays(source, [held(t) for t in leaving], with_state=with_state and source.migrates):
                for trajectory in leaving:
                    self._fleet.bind(trajectory, version, idle.take())

    def _is_in_the_way(self, instance: Instance) -> bool:
        return self._versions.newest not in instance.hosted and len(instance.unfinished) >= instance.live_versions


def _by_name(instances: Iterable[Instance]) -> list[Instance]:
    return sorted(instances, key=lambda instance: instance.name)


def _pays(source: Instance, tokens: list[int], *, with_state: bool) -> bool:
    again = 0 if with_state else sum(tokens)
    return again < (source.slots - source.load) * max(tokens)


class _IdleSlots:
    """Of instances, the least loaded first. ``count``: how many there are."""

    def __init__(self, instances: Iterable[Instance]) -> None:
        self._heap = [(i.load / i.slots, i.name, i.load, i) for i in instances if i.load < i.slots and not i.pressure]
        heapq.heapify(self._heap)
        self.count = sum(instance.slots - load for _, _, load, instance in self._heap)

    def take(self) -> Instance:
        """One of them; there are some."""
        _, name, load, instance = heapq.heappop(self._heap)
        self.count -= 1
        if load + 1 < instance.slots:
            heapq.heappush(self._heap, ((load + 1) / instance.slots, name, load + 1, instance))
        return instance
