"""One partition at the ledger: its rows, and the calls of its consumers that wait."""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from math import inf
from time import monotonic

import numpy as np

from headrace.contract import Array
from headrace.dataplane.messages import Granted, LeaseCall, LeaseRef, Note, Noted, PartitionSpec
from headrace.dataplane.sharing import Sharing
from headrace.errors import ContractError, DeadlineError, RunError
from headrace.flow.ages import Ages
from headrace.flow.leases import Lease
from headrace.flow.ledger import Ledger
from headrace.wire import Promise

_Waiter = tuple[int, int, LeaseCall, asyncio.Future[Granted], float]
_SPARE = 64
"""Calls that gave up which are always borne with."""


class Waiting:
    """Calls of one consumer, smallest first. One that cannot be served holds up those that ask for as much or more and
    are as particular about versions, or ask for the same shared batch, and no others."""

    def __init__(self) -> None:
        self._heaps: dict[tuple[int, int], list[_Waiter]] = {}
        """What the first of a heap cannot have, none of the heap can."""
        self._order = 0
        self._kept = self._waiting = 0
        """Calls in heaps, and those of them that did not give up."""

    def __len__(self) -> int:
        return self._waiting

    def add(self, call: LeaseCall) -> asyncio.Future[Granted]:
        future: Promise[Granted] = Promise()
        heapq.heappush(self._heaps.setdefault(_kind(call), []), (call.at_least, self._order, call, future, monotonic()))
        self._order += 1
        self._kept += 1
        self._waiting += 1
        timer = asyncio.get_running_loop().call_later(call.wait, _give_up, future, call)
        future.add_done_callback(lambda _: self._ended(timer))
        return future

    def longest(self, now: float) -> float:
        """For how many seconds the one that waits longest has; 0 when none does. O(waiting)."""
        since = [waiter[4] for heap in self._heaps.values() for waiter in heap if not waiter[3].done()]
        return now - min(since, default=now)

    def end(self, error: Exception) -> None:
        """None of them will be answered."""
        for heap in self._heaps.values():
            for _, _, _, future, _ in heap:
                if not future.done():
                    future.set_exception(error)
        self._heaps.clear()
        self._kept = 0

    def _ended(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._waiting -= 1
        if self._kept > 2 * self._waiting + _SPARE:
            self._forget()

    def _forget(self) -> None:
        """Calls that gave up behind one that still waits."""
        left = {kind: [w for w in heap if not w[3].done()] for kind, heap in self._heaps.items()}
        self._heaps = {kind: heap for kind, heap in left.items() if heap}
        for heap in self._heaps.values():
            heapq.heapify(heap)
        self._kept = sum(map(len, self._heaps.values()))

    def serve(self, grant: Callable[[LeaseCall], Granted | None]) -> None:
        """Answer those that can be. O(answered · log waiting + different kinds)."""
        firsts = [(*heap[0][:2], kind) for kind, heap in self._heaps.items()]
        heapq.heapify(firsts)
        while firsts:
            _, _, kind = heapq.heappop(firsts)
            heap = self._heaps[kind]
            _, _, call, future, _ = heap[0]
            if not future.done():
                granted = grant(call)
                if granted is None:
                    continue
                future.set_result(granted)
            heapq.heappop(heap)
            self._kept -= 1
            if heap:
                heapq.heappush(firsts, (*heap[0][:2], kind))
            else:
                del self._heaps[kind]


@dataclass(slots=True, eq=False)
class _Leaving:
    """``leases``: that hold the group; ``units``: int16 [rows, columns], who has what."""

    leases: int
    rows: Array
    units: Array


class PartitionLedger:
    """One table."""

    def __init__(self, spec: PartitionSpec, ledger: Ledger) -> None:
        self.spec = spec
        self.ledger = ledger
        places = {name: place for place, name in enumerate(spec.columns)}
        self._reads: dict[str, list[int] | None] = {
            name: None if reads == tuple(places) else [places[column] for column in reads]
            for name, reads in spec.consumers.items()
        }
        """Places of the columns that a consumer reads; None for one that reads all, in their order."""
        self.waiting = {name: Waiting() for name in spec.consumers}
        self._leaving: dict[int, _Leaving] = {}
        """Groups that left while they were on lease."""
        self._lost: list[int] = []
        """Every group that ever was, in order."""
        self._asking: dict[asyncio.Future[list[int]], int] = {}
        """Who waits for more of them, and how many each has seen."""
        self.ages = Ages()
        self.made = 0
        """Tells it from others of its name; given by whoever serves it."""
        self._sharing = Sharing(ledger, self._granted)

    @classmethod
    def make(cls, spec: PartitionSpec, first: int) -> PartitionLedger:
        """An empty one. Row ids begin at ``first``, which no other partition's reach."""
        ledger = Ledger(
            group_size=spec.group_size,
            columns=tuple(spec.columns),
            consumers=spec.consumers,
            writes=spec.writes,
            by_row=spec.by_row,
            first_group=first // spec.group_size + 1,
        )
        return cls(spec, ledger)

    def end(self) -> Iterator[tuple[Array, Array]]:
        """It is over. Returns rows that units have, those on lease too, and who has which of their columns."""
        for waiting in self.waiting.values():
            waiting.end(ContractError(f"partition {self.spec.name!r} has ended", fix="ask for rows of the next one"))
        left = self.drop(self.ledger.open_groups())
        rows = self.ledger.rows_of(left)
        yield rows, self.ledger.units_of(rows)
        for leaving in self._leaving.values():
            yield leaving.rows, leaving.units

    def forsake(self, consumer: str) -> list[Lease]:
        """A consumer is gone, as far as it is one of this partition: nobody waits in its name, and what it held is
        ready again. Returns the leases that this ended."""
        if consumer not in self.waiting:
            return []
        self.waiting[consumer].end(RunError(f"{consumer} was lost", fix="its successor asks anew"))
        # What is given back last comes first.
        return [self.ledger.release(lease) for lease in reversed(self.ledger.leases.of(consumer))]

    def expire(self, now: float) -> tuple[Lease, ...]:
        """End the leases whose time has come; returns them."""
        return self.ledger.expire(now)

    def look(self, now: float) -> None:
        """Time has passed."""
        self.ages.look(now, oldest=self.ledger.oldest_group, end=self.ledger.next_group)

    def check(self, call: LeaseCall) -> LeaseCall:
        """The call as it is to be answered. ContractError for a consumer or a column that there is not, and for numbers
        that mean nothing."""
        reads = self.spec.consumers.get(call.consumer)
        if reads is None:
            raise ContractError(
                f"partition {self.spec.name!r} has no consumer {call.consumer!r}",
                fix=f"its consumers are {', '.join(self.spec.consumers)}",
            )
        for column in call.columns:
            if column not in reads:
                raise ContractError(
                    f"consumer {call.consumer!r} of partition {self.spec.name!r} asks for {column!r}",
                    fix=f"it reads {', '.join(reads)}",
                )
        if not 1 <= call.at_least <= call.groups:
            raise ContractError(
                f"a lease of {call.groups} groups, at least {call.at_least}", fix="1 <= at_least <= groups"
            )
        if min(call.token_budget, call.min_version) < 0:
            raise ContractError(
                f"a lease with token_budget = {call.token_budget} and min_version = {call.min_version}",
                fix="both are at least 0",
            )
        if call.share is not None and call.consumer in self.spec.by_row:
            raise ContractError(
                f"consumer {call.consumer!r} of partition {self.spec.name!r} shares batches, and is given rows",
                fix="ranks share whole groups: leave it out of by_row",
            )
        check_wait(call.wait)
        check_held_for(call.seconds)
        return call if call.share is None else self._sharing.check(call, call.share)

    def is_cut(self, call: LeaseCall) -> bool:
        """Whether it asks for a batch that is shared, and was cut when another asked for it."""
        return call.share is not None and self._sharing.is_cut(call, call.share)

    def first_batch(self, consumer: str) -> int:
        """The first batch that not every rank has acknowledged."""
        return self._sharing.first(consumer)

    def acknowledge(self, ref: LeaseRef) -> tuple[Lease, Array] | None:
        """The lease that ends and the groups that every consumer is done with; None while other ranks share the batch.
        ValueError when it is not held."""
        if ref.holder is not None:
            return self._sharing.acknowledge(ref.lease, ref.holder)
        return self.ledger.acknowledge(ref.lease)

    def extend(self, ref: LeaseRef) -> None:
        """ValueError when the lease is not held."""
        until = monotonic() + ref.seconds
        if ref.holder is not None:
            self._sharing.extend(ref.lease, ref.holder, until)
        else:
            self.ledger.extend(ref.lease, deadline=until)

    def drop(self, groups: Iterable[int]) -> Array:
        """Whole groups are given up. Returns those to be freed now."""
        dropped = [group for group in dict.fromkeys(groups) if self.ledger.is_open(group)]
        for group in dropped:
            self.ledger.drop(group)
        return self._unread(np.array(dropped, dtype=np.int64))

    def lose(self, unit: int) -> Array:
        """A unit is gone with its values. Returns the groups whose others are to be freed now."""
        groups = self.ledger.lose(unit)
        self._name_lost(groups.tolist())
        return self._unread(groups)

    def _unread(self, groups: Array) -> Array:
        """Those of groups that left which no lease holds: what may be read under a lease stays until it ends."""
        held = self.ledger.leases.holders(groups)
        for group, leases in held.items():
            rows = self.ledger.rows_of(np.array([group]))
            self._leaving[group] = _Leaving(leases, rows, self.ledger.units_of(rows))
        return groups[~np.isin(groups, list(held))]

    def unread(self, lease: Lease) -> Iterator[tuple[Array, Array]]:
        """A lease has ended: rows that left under it and that no other holds, and who has which of their columns."""
        for group in lease.groups.tolist() if self._leaving else ():
            leaving = self._leaving.get(group)
            if leaving is not None:
                leaving.leases -= 1
                if not leaving.leases:
                    yield leaving.rows, self._leaving.pop(group).units

    def _name_lost(self, groups: list[int]) -> None:
        self._lost += groups
        for promise, seen in self._asking.items():
            if seen < len(self._lost) and not promise.done():
                promise.set_result(self._lost[seen:])

    def give_up(self, groups: Array, *, new: bool) -> Array:
        """Groups that a unit could not keep. Returns those to be freed now. Producers are told, but not of ``new``
        groups: their put fails."""
        gone = self.ledger.give_up(groups)
        if not new:
            self._name_lost(gone.tolist())
        return self._unread(gone)

    def lost(self, seen: int, wait: float) -> list[int] | asyncio.Future[list[int]]:
        """Groups lost after the first ``seen``; a promise of at most ``wait`` seconds when there are none."""
        if seen < 0:
            raise ContractError(f"{seen} lost groups were seen", fix="count those that were told, from 0 on")
        if seen < len(self._lost):
            return self._lost[seen:]
        promise: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._asking[promise] = seen
        timer = asyncio.get_running_loop().call_later(wait, _nothing, promise)
        promise.add_done_callback(lambda _: self._answered(promise, timer))
        return promise

    def _answered(self, promise: asyncio.Future[list[int]], timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        del self._asking[promise]

    def note(self, note: Note, unit: int) -> Noted:
        """What a unit is about to keep; new rows get their ids."""
        if note.rows is not None:
            outcome = self.ledger.write(note.rows, note.columns, nbytes=note.nbytes, tokens=note.tokens, unit=unit)
            return Noted(refused=outcome if outcome.any() else None)
        size = self.spec.group_size
        groups, over = divmod(note.count, size)
        if over:
            raise ContractError(
                f"{note.count} new rows are no whole groups of {size}", fix="put the rows of a group together"
            )
        first = size * self.ledger.insert(
            groups, note.version, note.columns, nbytes=note.nbytes, tokens=note.tokens, unit=unit
        )
        return Noted(first)

    def grant(self, call: LeaseCall) -> Granted | None:
        """A lease, if there is enough."""
        if call.share is not None:
            return self._sharing.grant(call, call.share)
        lease = self.ledger.lease(
            call.consumer,
            call.groups,
            deadline=monotonic() + call.seconds,
            at_least=call.at_least,
            token_budget=call.token_budget or None,
            min_version=call.min_version or None,
        )
        return None if lease is None else self._granted(lease)

    def _granted(self, lease: Lease, shared: int = 0) -> Granted:
        table, units = self.ledger.contents(lease)
        reads = self._reads[lease.consumer]
        if reads is not None:
            units = units[:, reads]
        said = units.tobytes()
        if said == said[: units.itemsize] * units.size:  # for a few rows far cheaper than to compare numbers
            return Granted(lease.lease, table, units.item(0), shared=shared)
        return Granted(lease.lease, table, 0, units, shared=shared)


def _kind(call: LeaseCall) -> tuple[int, int]:
    return (call.min_version, -1) if call.share is None else (0, call.share.batch)


def check_wait(seconds: float) -> None:
    """ContractError for what is no time to wait."""
    if not 0 <= seconds < inf:
        raise ContractError(f"a wait of {seconds} seconds", fix="wait for a number of seconds, at least 0")


def check_held_for(seconds: float) -> None:
    """ContractError for what is no time to hold a lease."""
    if not 0 < seconds < inf:
        raise ContractError(f"a lease held for {seconds} seconds", fix="hold it for a number of seconds above 0")


def _give_up(future: asyncio.Future[Granted], call: LeaseCall) -> None:
    if not future.done():
        what = f"{call.at_least} groups of partition {call.partition!r} for {call.consumer}"
        future.set_exception(DeadlineError(f"there were no {what} within {call.wait:g} s"))


def _nothing(promise: asyncio.Future[list[int]]) -> None:
    if not promise.done():
        promise.set_result([])
