"""Who holds which groups, and until when."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from headrace.contract import Array

_SPARE = 64
"""Entries of leases that have ended which are always borne with."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lease:
    """Groups held by a consumer, or rows of them. ``groups``: int64, oldest version first; ``rows``: int64, those that
    are held of them, by a consumer that is given rows one by one; None: all."""

    lease: int
    consumer: str
    groups: Array
    deadline: float
    rows: Array | None = None


class Leases:
    """Those that are held. Each operation costs O(log leases), amortised; memory is O(leases)."""

    def __init__(self, first: int = 0) -> None:
        self._held: dict[int, Lease] = {}
        self._deadlines: list[tuple[float, int]] = []
        """A heap; an entry counts while its lease is held with that very deadline."""
        self._next = first

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, lease: int) -> bool:
        return lease in self._held

    def get(self, lease: int) -> Lease:
        """ValueError when it is not held."""
        if lease not in self._held:
            raise ValueError(f"lease {lease} is not held: it expired, was released or was acknowledged")
        return self._held[lease]

    def grant(self, consumer: str, groups: Array, deadline: float, *, rows: Array | None = None) -> Lease:
        """A new one."""
        lease = Lease(lease=self._next, consumer=consumer, groups=groups, deadline=deadline, rows=rows)
        self._next += 1
        self._hold(lease)
        return lease

    def extend(self, lease: int, deadline: float) -> None:
        """ValueError when it is not held."""
        self._hold(replace(self.get(lease), deadline=deadline))

    def end(self, lease: int) -> Lease:
        """It is held no more. ValueError when it was not."""
        held = self.get(lease)
        del self._held[lease]
        return held

    def holders(self, groups: Array) -> dict[int, int]:
        """How many leases hold each of ``groups``; those that none holds are left out. O(groups that are held)."""
        held = [lease.groups[np.isin(lease.groups, groups)] for lease in self._held.values()]
        found, leases = np.unique(np.concatenate([groups[:0], *held]), return_counts=True)
        return dict(zip(found.tolist(), leases.tolist(), strict=True))

    def of(self, consumer: str) -> list[int]:
        """Those that a consumer holds, the first that was granted first."""
        return [lease.lease for lease in self._held.values() if lease.consumer == consumer]

    def due(self, now: float) -> Iterator[int]:
        """Leases whose deadline has come, first deadline first; one that was extended to the deadline that it had comes
        twice, unless the caller ends it before it takes the next."""
        while self._deadlines and self._deadlines[0][0] <= now:
            deadline, lease = heapq.heappop(self._deadlines)
            held = self._held.get(lease)
            if held is not None and held.deadline == deadline:
                yield lease

    def _hold(self, lease: Lease) -> None:
        self._held[lease.lease] = lease
        heapq.heappush(self._deadlines, (lease.deadline, lease.lease))
        if len(self._deadlines) > 2 * len(self._held) + _SPARE:  # most have ended long before their deadline
            self._deadlines = [(held.deadline, held.lease) for held in self._held.values()]
            heapq.heapify(self._deadlines)
