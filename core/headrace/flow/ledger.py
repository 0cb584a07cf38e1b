"""Rows × columns × consumers: what is stored, who may read it, who has it on lease.

A group of ``group_size`` rows is *ready* for a consumer when every member has all columns the consumer reads. A
consumer leases whole groups, oldest version first, then id; a lease is acknowledged, released, or expires, and in the
last two cases its groups are ready again. A group leaves the ledger when every consumer has acknowledged it, or when
it is dropped.

Columnar numpy arrays inside, no Python object per row; every operation is O(its own rows), never O(outstanding).
Invariant: each consumer is given each group once at a time, complete, and acknowledges it at most once.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from headrace.flow.records import FlowState, StoredGroup
from headrace.flow.table import Table

Written = Literal["stored", "duplicate", "late", "unknown"]
"""``duplicate``: one of the columns is there already; ``late``: the group was acknowledged by all or dropped;
``unknown``: never opened. Only ``stored`` changes anything."""

_PENDING, _READY, _LEASED, _DONE = range(4)
_NO_VERSION = np.iinfo(np.int64).max


@dataclass(slots=True)
class _Consumer:
    index: int
    reads: int
    """Bit mask of columns."""
    ready: dict[int, int] = field(default_factory=dict)
    """Groups by version."""
    heap: list[tuple[int, int]] = field(default_factory=list)
    """(version, group) of every ready group; those dropped meanwhile are skipped when they surface."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease:
    """Groups held by a consumer. ``groups``: oldest version first, then id."""

    lease: int
    consumer: str
    groups: tuple[int, ...]
    deadline: float


class Ledger:
    """``columns``: all there are; ``consumers``: name → the columns it reads. ``nbytes``, ``buffered``: bytes and rows
    stored in groups that have not left."""

    def __init__(
        self,
        *,
        group_size: int,
        columns: Sequence[str],
        consumers: Mapping[str, Collection[str]],
        first_group: int = 0,
    ) -> None:
        self.group_size = group_size
        self.nbytes = 0
        self.buffered = 0
        self._bits = {column: 1 << place for place, column in enumerate(columns)}
        self._all = (1 << len(columns)) - 1
        self._consumers = {
            name: _Consumer(index=index, reads=self._mask(reads))
            for index, (name, reads) in enumerate(consumers.items())
        }
        self._groups = Table(
            {
                "opened": (np.int64, ()),
                "oldest": (np.int64, ()),
                "left": (np.bool_, ()),
                "reserved": (np.bool_, ()),
                "written": (np.int64, (group_size,)),
                "tokens": (np.int64, (group_size,)),
                "nbytes": (np.int64, (group_size,)),
                "complete": (np.int64, (len(consumers),)),
                "state": (np.int8, (len(consumers),)),
            },
            first=first_group,
        )
        self._first_group = first_group
        self._reserved: deque[int] = deque()
        """Groups to be opened before any new one, ascending."""
        self._leases: dict[int, Lease] = {}
        self._next_lease = 0

    # ------------------------------------------------------------ groups

    @property
    def next_group(self) -> int:
        """The id of the next group that was never opened before."""
        return self._groups.end

    @property
    def reserved(self) -> Collection[int]:
        """Groups that will be opened before any new one."""
        return self._reserved

    def open(self, version: int) -> int:
        """A group, whose rows are at best of ``version``; returns its id: :attr:`next_group`, unless an earlier run
        left groups to be opened again."""
        group = self._reserved.popleft() if self._reserved else self._groups.append()
        self._groups.set("opened", group, version)
        self._groups.set("oldest", group, _NO_VERSION)
        self._groups.set("reserved", group, False)
        return group

    def is_open(self, group: int) -> bool:
        """Opened, and neither acknowledged by every consumer nor dropped."""
        return group in self._groups and not self._groups.get("left", group) and not self._groups.get("reserved", group)

    def open_groups(self) -> Iterator[int]:
        """Ascending. O(groups since the oldest open one)."""
        return (group for group in range(self._groups.low, self._groups.end) if self.is_open(group))

    def version(self, group: int) -> int:
        """The version an open group was opened under."""
        return int(self._groups.get("opened", group))

    def tokens(self, group: int) -> list[int]:
        """Tokens of each row of an open group."""
        tokens: list[int] = self._groups.get("tokens", group).tolist()
        return tokens

    def rows(self, group: int) -> range:
        """Row ids of a group."""
        return range(group * self.group_size, (group + 1) * self.group_size)

    def is_written(self, row: int) -> bool:
        """Whether a row of an open group has a column."""
        return bool(self._groups.get("written", row // self.group_size)[row % self.group_size])

    def is_complete(self, group: int) -> bool:
        """Whether every row of an open group has every column."""
        return bool((self._groups.get("written", group) == self._all).all())

    def drop(self, group: int) -> int:
        """An open group leaves; returns how many of its rows were stored. ValueError while it is on lease."""
        states = self._groups.get("state", group)
        if (states == _LEASED).any():
            raise ValueError(f"group {group} is on lease; release it before dropping it")
        for consumer in self._consumers.values():
            if states[consumer.index] == _READY:
                self._count(consumer, group, -1)
        stored = int(np.count_nonzero(self._groups.get("written", group)))
        states[:] = _DONE
        self._leave(group)
        return stored

    # ------------------------------------------------------------ an earlier run

    def stored_groups(self) -> Iterator[StoredGroup]:
        """Open groups that are complete, ascending."""
        for group in self.open_groups():
            if self.is_complete(group):
                yield StoredGroup(
                    group=group,
                    version=self.version(group),
                    oldest=int(self._groups.get("oldest", group)),
                    tokens=tuple(self.tokens(group)),
                    nbytes=tuple(self._groups.get("nbytes", group).tolist()),
                )

    def restore(self, state: FlowState) -> None:
        """Continue an earlier ledger, in an empty one that begins at ``state.first_group``."""
        stored = {group.group: group for group in state.stored}
        self._reserved.extend(sorted(state.unfinished))
        while self._groups.end < state.next_group:
            group = self._groups.append()
            if group in stored:
                self._restore_group(stored[group])
            else:
                self._groups.set("reserved" if group in self._reserved else "left", group, True)

    def _restore_group(self, stored: StoredGroup) -> None:
        self._groups.set("opened", stored.group, stored.version)
        self._groups.set("oldest", stored.group, _NO_VERSION)
        for row, tokens, nbytes in zip(self.rows(stored.group), stored.tokens, stored.nbytes, strict=True):
            self.write(row, self._bits, nbytes=nbytes, tokens=tokens, version=stored.oldest)

    # ------------------------------------------------------------ rows

    def write(
        self, row: int, columns: Collection[str], *, nbytes: int, tokens: int = 0, version: int | None = None
    ) -> Written:
        """Columns of a row are stored. ``tokens``: what they add to the row's length; ``version``: of the row's oldest
        token (default: the group's), said with the row's first columns."""
        group, member = divmod(row, self.group_size)
        if not self.is_open(group):
            return "late" if self._first_group <= group < self._groups.end else "unknown"
        written = self._groups.get("written", group)
        old, added = int(written[member]), self._mask(columns)
        if old & added:
            return "duplicate"
        written[member] = new = old | added
        self._groups.get("tokens", group)[member] += tokens
        self._groups.get("nbytes", group)[member] += nbytes
        self.nbytes += nbytes
        if old == 0:
            self.buffered += 1
            oldest = self.version(group) if version is None else version
            self._groups.set("oldest", group, min(int(self._groups.get("oldest", group)), oldest))
        for consumer in self._consumers.values():
            if old & consumer.reads != consumer.reads and new & consumer.reads == consumer.reads:
                self._complete_row(consumer, group)
        return "stored"

    def _complete_row(self, consumer: _Consumer, group: int) -> None:
        complete = self._groups.get("complete", group)
        complete[consumer.index] += 1
        if complete[consumer.index] == self.group_size:
            self._make_ready(consumer, group)

    # ------------------------------------------------------------ consumers

    def ready(self, consumer: str) -> dict[int, int]:
        """Groups that ``consumer`` could lease, by the version of their oldest token; a copy."""
        return dict(self._consumers[consumer].ready)

    def lease(self, consumer: str, groups: int, *, deadline: float) -> Lease | None:
        """``groups`` ready groups, oldest version first, then id; None when there are fewer."""
        who = self._consumers[consumer]
        if sum(who.ready.values()) < groups:
            return None
        chosen: list[int] = []
        while len(chosen) < groups:
            _, group = heapq.heappop(who.heap)
            if self.is_open(group):
                self._groups.get("state", group)[who.index] = _LEASED
                self._count(who, group, -1)
                chosen.append(group)
        lease = Lease(lease=self._next_lease, consumer=consumer, groups=tuple(chosen), deadline=deadline)
        self._leases[lease.lease] = lease
        self._next_lease += 1
        return lease

    def extend(self, lease: int, *, deadline: float) -> None:
        """Hold on to a lease until ``deadline``."""
        held = self._held(lease)
        self._leases[lease] = Lease(lease=lease, consumer=held.consumer, groups=held.groups, deadline=deadline)

    def release(self, lease: int) -> Lease:
        """Give the groups back: ready again."""
        held = self._held(lease)
        del self._leases[lease]
        for group in held.groups:
            self._make_ready(self._consumers[held.consumer], group)
        return held

    def expire(self, now: float) -> tuple[Lease, ...]:
        """Release the leases whose deadline has come. O(leases held)."""
        due = [lease for lease, held in self._leases.items() if held.deadline <= now]
        return tuple(self.release(lease) for lease in due)

    def acknowledge(self, lease: int) -> Lease:
        """The consumer is done with the groups; those that every consumer is done with leave."""
        held = self._held(lease)
        del self._leases[lease]
        index = self._consumers[held.consumer].index
        for group in held.groups:
            states = self._groups.get("state", group)
            states[index] = _DONE
            if (states == _DONE).all():
                self._leave(group)
        return held

    # ------------------------------------------------------------ inside

    def _held(self, lease: int) -> Lease:
        if lease not in self._leases:
            raise ValueError(f"lease {lease} is not held: it expired, was released or was acknowledged")
        return self._leases[lease]

    def _mask(self, columns: Collection[str]) -> int:
        return sum(self._bits[column] for column in set(columns))

    def _make_ready(self, consumer: _Consumer, group: int) -> None:
        self._groups.get("state", group)[consumer.index] = _READY
        self._count(consumer, group, +1)
        heapq.heappush(consumer.heap, (int(self._groups.get("oldest", group)), group))

    def _count(self, consumer: _Consumer, group: int, change: int) -> None:
        version = int(self._groups.get("oldest", group))
        count = consumer.ready.get(version, 0) + change
        if count:
            consumer.ready[version] = count
        else:
            del consumer.ready[version]

    def _leave(self, group: int) -> None:
        self.buffered -= int(np.count_nonzero(self._groups.get("written", group)))
        self.nbytes -= int(self._groups.get("nbytes", group).sum())
        self._groups.set("left", group, True)
        low = self._groups.low
        while low < self._groups.end and self._groups.get("left", low):
            low += 1
        self._groups.forget(low)
