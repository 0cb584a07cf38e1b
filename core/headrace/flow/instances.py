"""One inference engine replica as the flow knows it, and the least loaded of many."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")

_FULL = 1e6
"""Above any load per slot."""


@dataclass(slots=True, eq=False)
class Instance:
    """One inference engine replica."""

    name: str
    slots: int
    """Trajectories it decodes at once."""
    limit: float
    """It is given new work while it has fewer."""
    live_versions: int
    """Versions it can host at once."""
    hosted: set[int]
    serial: int
    """Counts joins: two instances of the same name differ in it."""
    migrates: bool = False
    """Whether it hands over, and takes, the state of a request."""
    unfinished: dict[int, set[int]] = field(default_factory=dict)
    """Version → trajectories placed here, or on their way here; no empty sets."""
    load: int = 0
    """How many these are."""
    pressure: float = 0.0
    """Share of its KV memory in use, where that is too much; else 0."""
    share: float = 0.0
    """Load per slot; more than of any other where it is full; infinite under pressure."""
    switching: bool = False
    """Whether the caller carries a switch out; no other is decided until it is done."""

    @property
    def order(self) -> tuple[float, str, int]:
        """Least loaded first, then by name."""
        return (self.share, self.name, self.serial)

    def is_idle_on(self, version: int) -> bool:
        """Whether no unfinished trajectory is placed here under ``version``."""
        return version not in self.unfinished

    @property
    def has_room(self) -> bool:
        """Whether it may be given more."""
        return self.share < _FULL

    def weigh(self, change: int) -> None:
        """So many trajectories more are here, or it came under pressure, or is not any more."""
        self.load += change
        self.share = math.inf if self.pressure else self.load / self.slots
        if self.load >= self.limit:
            self.share += _FULL


class Lightest:
    """Finds the least loaded of its members without looking at the others.

    A heap whose entries may be out of date: an instance that got lighter is entered again, one that got heavier is put
    right when it comes to the top. Invariant: every member has an entry that is not heavier than it is, so that the
    first entry that is right is the lightest member's. O(log members), amortised, for each change and each question.
    """

    def __init__(self) -> None:
        self.members: set[Instance] = set()
        self._heap: list[tuple[float, str, int, Instance]] = []

    def enter(self, instance: Instance) -> None:
        """It is a member now, or a member that got lighter."""
        self.members.add(instance)
        heapq.heappush(self._heap, (instance.share, instance.name, instance.serial, instance))
        if len(self._heap) > 2 * len(self.members) + 16:
            self._heap = [(member.share, member.name, member.serial, member) for member in self.members]
            heapq.heapify(self._heap)

    def leave(self, instance: Instance) -> None:
        """It is no member any more, if it was one."""
        self.members.discard(instance)

    def first(self) -> Instance | None:
        """The least loaded member; ties by name."""
        heap = self._heap
        while heap:
            share, _, _, instance = heap[0]
            if instance not in self.members or share > instance.share:  # it left, or has a lighter entry
                heapq.heappop(heap)
            elif share < instance.share:
                heapq.heapreplace(heap, (instance.share, instance.name, instance.serial, instance))
            else:
                return instance
        return None


def take_out(sets: dict[int, set[T]], version: int, member: T) -> None:
    """Of one of ``sets``, none of which is left empty."""
    sets[version].remove(member)
    if not sets[version]:
        del sets[version]
