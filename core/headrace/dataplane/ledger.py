"""The ledger as a service: partitions, leases, and consumers that wait.

A consumer that asks for what is not ready yet is answered by the write that makes it ready; nothing polls. Waiting
calls are served smallest first, so that one that asks for much never holds up one that asks for little. Invariant:
whatever leaves the ledger is deleted at the units that keep it.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import numpy as np

from headrace.contract import Array
from headrace.dataplane.messages import (
    Described,
    Granted,
    Groups,
    LeaseCall,
    LeaseRef,
    LostCall,
    Note,
    Noted,
    Notes,
    PartitionSpec,
    PartitionStats,
)
from headrace.dataplane.schema import Schema
from headrace.errors import ContractError, DeadlineError, RunError
from headrace.flow.ledger import Ledger
from headrace.wire import Client, rpc

log = logging.getLogger(__name__)

DELETE_DEADLINE = 60.0
WATCH_SECONDS = 0.25
"""How late a lease may end."""
SILENT_SECONDS = 5.0
"""A storage unit that was not heard of for this long is gone."""
GONE = -1.0
_PARTITION_BITS = 40
_ALL_KEPT = np.empty(0, dtype=np.int8)


class _Waiting:
    """Calls of one consumer, smallest first."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, LeaseCall, asyncio.Future[Granted]]] = []
        self._order = 0

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, call: LeaseCall) -> asyncio.Future[Granted]:
        future: asyncio.Future[Granted] = asyncio.get_running_loop().create_future()
        heapq.heappush(self._heap, (call.at_least, self._order, call, future))
        self._order += 1
        timer = asyncio.get_running_loop().call_later(call.wait, _give_up, future, call)
        future.add_done_callback(lambda _: timer.cancel())
        return future

    def serve(self, grant: Callable[[LeaseCall], Granted | None]) -> None:
        """Answer those that can be."""
        while self._heap:
            _, _, call, future = self._heap[0]
            if not future.done():
                granted = grant(call)
                if granted is None:
                    return
                future.set_result(granted)
            heapq.heappop(self._heap)


class _Partition:
    """One table. Row ids begin at ``first``, which no other partition's reach."""

    def __init__(self, spec: PartitionSpec, first: int) -> None:
        self.spec = spec
        self.ledger = Ledger(
            group_size=spec.group_size,
            columns=tuple(spec.columns),
            consumers=spec.consumers,
            first_group=first // spec.group_size + 1,
        )
        places = {name: place for place, name in enumerate(spec.columns)}
        self.reads = {name: [places[column] for column in reads] for name, reads in spec.consumers.items()}
        self.waiting = {name: _Waiting() for name in spec.consumers}
        self._lost: list[int] = []
        self._told_lost: asyncio.Future[list[int]] | None = None

    def lose(self, unit: int) -> None:
        """A unit is gone with its values."""
        self._lost += self.ledger.lose(unit).tolist()
        if self._lost and self._told_lost is not None and not self._told_lost.done():
            self._told_lost.set_result(self._take_lost())

    def lost(self, wait: float) -> list[int] | asyncio.Future[list[int]]:
        """Groups lost since the last call; a promise of at most ``wait`` seconds where there are none."""
        if self._lost:
            return self._take_lost()
        promise = self._told_lost = asyncio.get_running_loop().create_future()
        timer = asyncio.get_running_loop().call_later(wait, _nothing, promise)
        promise.add_done_callback(lambda _: timer.cancel())
        return promise

    def _take_lost(self) -> list[int]:
        lost, self._lost = self._lost, []
        return lost

    def note(self, note: Note, unit: int) -> Noted:
        """What a unit is about to keep; new rows get their ids."""
        rows, size = note.rows, self.spec.group_size
        if not len(rows):
            if note.count % size:
                raise ContractError(
                    f"{note.count} new rows are no whole groups of {size}", fix="put the rows of a group together"
                )
            first = self.ledger.open_many(note.count // size, note.version) * size
            rows = np.arange(first, first + note.count)
        outcome = self.ledger.write(rows, note.columns, nbytes=note.nbytes, tokens=note.tokens, unit=unit)
        return Noted(rows, outcome if outcome.any() else _ALL_KEPT)

    def grant(self, call: LeaseCall) -> Granted | None:
        """A lease, if there is enough."""
        ledger = self.ledger
        lease = ledger.lease(
            call.consumer,
            call.groups,
            deadline=monotonic() + call.seconds,
            at_least=call.at_least,
            token_budget=call.token_budget or None,
            min_version=call.min_version or None,
        )
        if lease is None:
            return None
        rows = ledger.rows_of(lease.groups)
        units = ledger.units_of(rows)[:, self.reads[call.consumer]]
        return Granted(lease.lease, rows, units, ledger.tokens_of(rows), ledger.attempts(lease))


class LedgerService:
    """``connect``: a client of the storage unit at an address."""

    def __init__(self, *, connect: Callable[[str], Client]) -> None:
        self._connect = connect
        self._partitions: dict[str, _Partition] = {}
        self._units: list[str] = []
        self._clients: list[Client] = []
        self._seen: list[float] = []
        """When each unit was last heard of, or ``GONE``."""
        self._freed: dict[int, list[Array]] = defaultdict(list)
        """Rows to delete, by unit."""
        self._timer: asyncio.TimerHandle | None = None

    async def close(self) -> None:
        """Waiting consumers are told."""
        if self._timer is not None:
            self._timer.cancel()
        for client in self._clients:
            await client.close()

    # ------------------------------------------------------------ units and partitions

    @rpc
    def join(self, address: str) -> int:
        """A storage unit is there, and still is: it says so every second. Returns its number. RunError for one that was
        given up: its rows are, or will be, made anew."""
        if address not in self._units:
            self._units.append(address)
            self._clients.append(self._connect(address))
            self._seen.append(monotonic())
        number = self._units.index(address) + 1
        if self._seen[number - 1] == GONE:
            raise RunError(
                f"the storage unit at {address} was silent for too long and was given up", fix="start another one"
            )
        self._seen[number - 1] = monotonic()
        self._watch()
        return number

    @rpc
    def create(self, spec: PartitionSpec) -> None:
        """Make a partition; one of the same name must be the same."""
        known = self._partitions.get(spec.name)
        if known is None:
            self._check(spec)
            self._partitions[spec.name] = _Partition(spec, len(self._partitions) << _PARTITION_BITS)
        elif known.spec != spec:
            raise ContractError(
                f"there is another partition {spec.name!r}: {known.spec}", fix="choose another name or the same columns"
            )

    @rpc
    def describe(self, partition: str) -> Described:
        """A partition and the units."""
        reached = ["" if seen == GONE else unit for unit, seen in zip(self._units, self._seen, strict=True)]
        return Described(self._partition(partition).spec, reached)

    @rpc
    def lost(self, call: LostCall) -> Any:
        """Groups whose values a unit has taken along: whoever made them makes them anew."""
        return self._partition(call.partition).lost(call.wait)

    @rpc
    def stats(self, partition: str) -> PartitionStats:
        """Where a partition stands."""
        found = self._partition(partition)
        ledger = found.ledger
        return PartitionStats(
            rows=ledger.buffered,
            nbytes=ledger.nbytes,
            leases=len(ledger.leases),
            ready={name: sum(ledger.ready(name).values()) for name in found.spec.consumers},
            waiting={name: len(waiting) for name, waiting in found.waiting.items()},
        )

    # ------------------------------------------------------------ rows

    @rpc
    def note(self, notes: Notes) -> list[Noted]:
        """What a unit is about to keep. It answers its producers when it has this answer, so that what they know to be
        stored is known here too."""
        noted = []
        touched = dict.fromkeys(note.partition for note in notes.notes)
        for note in notes.notes:
            noted.append(self._partition(note.partition).note(note, notes.unit))
        for name in touched:
            self._serve(self._partitions[name])
        return noted

    @rpc
    def lease(self, call: LeaseCall) -> Any:
        """Granted now, or by the write that makes it possible. The wait ends here and not at the caller, who could
        otherwise leave just when the lease is granted, and nobody would have the rows until it expires."""
        partition = self._partition(call.partition)
        if call.consumer not in partition.waiting:
            raise ContractError(
                f"partition {call.partition!r} has no consumer {call.consumer!r}",
                fix=f"its consumers are {', '.join(partition.waiting)}",
            )
        self._watch()
        waiting = partition.waiting[call.consumer]
        granted = None if len(waiting) else partition.grant(call)
        if granted is not None:
            return granted
        future = waiting.add(call)
        waiting.serve(partition.grant)
        return future

    @rpc
    def acknowledge(self, ref: LeaseRef) -> None:
        """The consumer is done with the rows."""
        partition = self._partition(ref.partition)
        with _held():
            _, left = partition.ledger.acknowledge(ref.lease)
        self._free(partition, left)

    @rpc
    def release(self, ref: LeaseRef) -> None:
        """The consumer gives the rows back."""
        partition = self._partition(ref.partition)
        with _held():
            partition.ledger.release(ref.lease)
        self._serve(partition)

    @rpc
    def extend(self, ref: LeaseRef) -> None:
        """The consumer needs longer."""
        with _held():
            self._partition(ref.partition).ledger.extend(ref.lease, deadline=monotonic() + ref.seconds)

    @rpc
    def drop(self, groups: Groups) -> None:
        """Give whole groups up; those that are not there any more are skipped."""
        partition = self._partition(groups.partition)
        open_groups = [group for group in groups.groups if partition.ledger.is_open(group)]
        for group in open_groups:
            partition.ledger.drop(group)
        self._free(partition, np.array(open_groups, dtype=np.int64))

    # ------------------------------------------------------------ inside

    def _partition(self, name: str) -> _Partition:
        if name not in self._partitions:
            known = ", ".join(sorted(self._partitions)) or "none yet"
            raise ContractError(f"no partition {name!r}", fix=f"create it first; there are: {known}")
        return self._partitions[name]

    def _check(self, spec: PartitionSpec) -> None:
        Schema(spec)
        wrong = {name: [c for c in reads if c not in spec.columns] for name, reads in spec.consumers.items()}
        for name, columns in wrong.items():
            if columns or not spec.consumers[name]:
                raise ContractError(
                    f"consumer {name!r} of partition {spec.name!r} reads {columns or 'no column'}",
                    fix=f"the columns are {', '.join(spec.columns)}",
                )
        if spec.length_of and not (spec.length_of in spec.columns and spec.columns[spec.length_of].ragged):
            raise ContractError(
                f"length_of = {spec.length_of!r} is no ragged column of partition {spec.name!r}",
                fix="name the ragged column whose length is the number of tokens",
            )
        if spec.group_size < 1:
            raise ContractError(f"group_size = {spec.group_size} of partition {spec.name!r}", fix="it is at least 1")

    def _serve(self, partition: _Partition) -> None:
        for waiting in partition.waiting.values():
            if len(waiting):
                waiting.serve(partition.grant)

    def _free(self, partition: _Partition, groups: Array) -> None:
        """Tell the units, once for everything that leaves in one turn of the loop."""
        if not len(groups):
            return
        if not self._freed:
            asyncio.get_running_loop().call_soon(self._delete)
        rows = partition.ledger.rows_of(groups)
        units = partition.ledger.units_of(rows)
        for unit in np.unique(units[units > 0]).tolist():
            self._freed[unit].append(rows[(units == unit).any(axis=1)])

    def _delete(self) -> None:
        for unit, rows in self._freed.items():
            if self._seen[unit - 1] == GONE:
                continue
            call = self._clients[unit - 1].submit(
                "delete",
                np.concatenate(rows),
                reply=type(None),
                deadline=DELETE_DEADLINE,
                awaiting="a storage unit to free rows",
            )
            call.add_done_callback(_told)
        self._freed.clear()

    def _watch(self) -> None:
        """See to it that leases expire and that units that are gone are missed: nobody else need come by."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look)

    def _look(self) -> None:
        self._timer = None
        now = monotonic()
        for number, seen in enumerate(self._seen, 1):
            if GONE < seen < now - SILENT_SECONDS:
                self._lose(number)
        for partition in self._partitions.values():
            if partition.ledger.expire(now):
                self._serve(partition)
        self._watch()

    def _lose(self, unit: int) -> None:
        log.error("the storage unit at %s is silent: its rows are lost", self._units[unit - 1])
        self._seen[unit - 1] = GONE
        self._freed.pop(unit, None)
        for partition in self._partitions.values():
            partition.lose(unit)


@contextmanager
def _held() -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise RunError(
            str(error), fix="its rows are, or will be, given to another: do not use what came of them"
        ) from None


def _give_up(future: asyncio.Future[Granted], call: LeaseCall) -> None:
    if not future.done():
        what = f"{call.at_least} groups of partition {call.partition!r} for {call.consumer}"
        future.set_exception(DeadlineError(f"there were no {what} within {call.wait:g} s"))


def _nothing(promise: asyncio.Future[list[int]]) -> None:
    if not promise.done():
        promise.set_result([])


def _told(call: asyncio.Future[None]) -> None:
    if not call.cancelled() and (error := call.exception()):
        log.warning("rows stay in a storage unit until it ends: %s", error)
