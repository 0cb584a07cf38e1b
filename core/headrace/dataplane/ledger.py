"""The ledger as a service: partitions, leases, and consumers that wait.

A consumer that asks for what is not ready yet is answered by the write that makes it ready; nothing polls. Waiting
calls are served smallest first, so that one that asks for much never holds up one that asks for little. Invariant:
whatever leaves the ledger is deleted at the units that keep it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic
from typing import Any

import numpy as np

from headrace.contract import Array
from headrace.dataplane.asking import check_held_for, check_wait
from headrace.dataplane.links import RemoteUnit
from headrace.dataplane.messages import (
    Described,
    Fetch,
    FirstBatch,
    Frozen,
    Granted,
    Groups,
    Join,
    LeaseCall,
    LeaseRef,
    LookCall,
    LostCall,
    Note,
    Noted,
    Notes,
    PartitionSpec,
    PartitionState,
    PartitionStats,
    StatsCall,
    UnitFigures,
    Unkept,
)
from headrace.dataplane.partition import PartitionLedger
from headrace.dataplane.refusals import ended_in_words, not_taken
from headrace.dataplane.schema import check_made, check_spec
from headrace.dataplane.shards import partition_of
from headrace.dataplane.unit import UnitService
from headrace.dataplane.units import Units
from headrace.errors import ContractError, HeadraceError, LostRowsError, RunError
from headrace.flow.leases import Lease
from headrace.wire import Client, rpc
from headrace.wire.failures import unexpected

log = logging.getLogger(__name__)

WATCH_SECONDS = 0.25
"""How late a lease may end."""


class LedgerService:
    """``connect``: a client of the storage unit at an address. ``shard``: which of ``shards`` it is; ``watched``:
    whether :meth:`lose` is called for each storage unit that is lost: see :mod:`headrace.dataplane.units`."""

    def __init__(
        self, *, connect: Callable[[str], Client], shard: int = 0, shards: int = 1, watched: bool = False
    ) -> None:
        self._place = shard, shards
        self._partitions: dict[str, PartitionLedger] = {}
        self._units = Units(lambda address: RemoteUnit(connect(address)), watched=watched)
        self._own: UnitService | None = None
        """In this process: what it keeps travels with the lease."""
        self._own_number = 0
        self._timer: asyncio.TimerHandle | None = None
        self._count = 0
        """Of partitions that there ever were."""
        self._heard: dict[int, tuple[int, list[Noted]]] = {}
        """The last word of each unit, by its turn, and what was answered."""

    async def close(self) -> None:
        """Waiting consumers are told."""
        if self._timer is not None:
            self._timer.cancel()
        await self._units.close()

    # ------------------------------------------------------------ units and partitions

    def add_own(self, unit: UnitService, address: str) -> None:
        """A unit in this process, which is reached at ``address`` as the ledger is."""
        self._own = unit
        self._own_number = self._units.add_own(address, unit)
        unit.numbered(self._own_number)

    @rpc
    def join(self, unit: Join) -> int:
        """A storage unit is there, and still is: it says so every second. Returns its number. RunError for one that was
        given up: its rows are, or will be, made anew. Another process at an address has not what was there before."""
        number = self._units.join(unit)
        self._lose(self._units.lose_replaced(unit))
        self._watch()
        return number

    @rpc
    def create(self, spec: PartitionSpec) -> None:
        """Make a partition; one of the same name must be the same."""
        known = self._partitions.get(spec.name)
        if known is None:
            check_spec(spec)
            self._add(PartitionLedger.make(spec, shard=self._place[0], number=self._count))
        elif known.spec != spec:
            raise ContractError(
                f"there is another partition {spec.name!r}: {known.spec}", fix="choose another name or the same columns"
            )

    def add(self, partition: PartitionLedger) -> None:
        """Serve a partition whose ledger another keeps too."""
        check_spec(partition.spec)
        self._add(partition)

    def _add(self, partition: PartitionLedger) -> None:
        self._count += 1
        self._partitions[partition.spec.name] = partition

    @rpc
    def remove(self, name: str) -> None:
        """A partition ends, with all its rows; consumers that wait for some are told."""
        for rows, units in self._partition(name).end():
            self._units.free(rows, units)
        del self._partitions[name]

    def forsake(self, consumer: str) -> None:
        """The process of a consumer is known to be gone: its successor gets what it held."""
        for partition in self._partitions.values():
            self._free_unread(partition, partition.forsake(consumer))

    def lose(self, address: str) -> None:
        """The unit at this address is known to be gone."""
        self._lose(self._units.lose(address))

    @property
    def partitions(self) -> Iterable[PartitionLedger]:
        """All there are."""
        return self._partitions.values()

    async def unit_figures(self) -> dict[str, UnitFigures | None]:
        """By address; None for those that do not answer."""
        return await self._units.figures()

    @rpc
    def units(self, wait: float | None) -> Any:
        """Addresses of all units by number, "" of those that are gone; as soon as there is one, or DeadlineError after
        ``wait`` seconds. None: as long as the caller waits."""
        if wait is not None:
            check_wait(wait)
        return self._units.some(wait)

    @rpc
    def describe(self, partition: str) -> Described:
        """A partition and the units."""
        found = self._partition(partition)
        return Described(found.spec, self._units.addresses(), found.made, *self._place)

    @rpc
    def lost(self, call: LostCall) -> Any:
        """Groups whose values a unit has taken along: whoever made them makes them anew. Each caller is told of all,
        so that nothing is missed when one dies that was told."""
        check_wait(call.wait)
        return self._partition(call.partition, call.made).lost(call.seen, call.wait)

    @rpc
    def stats(self, call: StatsCall) -> PartitionStats:
        """Where a partition stands."""
        found = self._partition(call.partition, call.made)
        ledger = found.ledger
        return PartitionStats(
            rows=ledger.buffered,
            nbytes=ledger.nbytes,
            leases=len(ledger.leases),
            ready={name: sum(ledger.ready(name).values()) for name in found.spec.consumers},
            waiting={name: found.waiting_calls(name) for name in found.spec.consumers},
        )

    # ------------------------------------------------------------ snapshots

    @rpc
    def freeze(self, seconds: float) -> Frozen:
        """All partitions at this moment. What leaves them stays in the units until :meth:`thaw`, for at most
        ``seconds``."""
        check_held_for(seconds)
        states = [partition.state() for partition in self._partitions.values()]
        return Frozen(self._units.hold(seconds), states, self._units.addresses())

    @rpc
    def thaw(self, hold: int) -> None:
        """RunError when the time was over before."""
        if not self._units.let_go(hold):
            raise RunError(
                "storage units did not keep what a snapshot names until it was written", fix="give it a later deadline"
            )

    @rpc
    def restore(self, states: list[PartitionState]) -> None:
        """Continue the partitions of a snapshot. ContractError where there are partitions already."""
        if self._partitions:
            raise ContractError(
                f"the ledger has partitions already: {', '.join(sorted(self._partitions))}",
                fix="restore a snapshot before anything else, into a ledger and units that were just started",
            )
        for state in states:
            # It has the range of ids that it had, and those that come after it have others.
            self._count = partition_of(state.ledger.next_group * state.spec.group_size)
            self.create(state.spec)
            self._partitions[state.spec.name].restore(state)

    # ------------------------------------------------------------ rows

    @rpc
    def note(self, notes: Notes) -> list[Noted]:
        """What a unit is about to keep. It answers its producers when it has this answer, so that what they know to be
        stored is known here too. Consumers are told at once, but of rows in this process when these are kept. Each
        note is judged alone: what is wrong with one costs nobody but its producer. A word that is said again, because
        the answer did not arrive, is answered as before. RunError for a unit that was given up or never joined."""
        self._units.require(notes.unit)
        turn, answered = self._heard.get(notes.unit, (0, []))
        if notes.turn and notes.turn == turn:
            return answered
        noted = [self._note(note, notes.unit) for note in notes.notes]
        if notes.unit != self._own_number:
            told = zip(notes.notes, noted, strict=True)
            for name in {note.partition for note, answer in told if answer.failed is None and not answer.remade}:
                self.kept(name)
        self._heard[notes.unit] = notes.turn, noted
        return noted

    def _note(self, note: Note, unit: int) -> Noted:
        try:
            partition = self._partition(note.partition)
            if note.made not in (0, partition.made):
                return Noted(remade=True)
            noted = partition.note(note, unit)
            if partition.spec.writes:
                self._free(partition, partition.left(partition.ledger.take_left()))
            return noted
        except HeadraceError as error:
            return not_taken(error)
        except Exception as error:
            # The supervisor of notes: one note's bug ends that put, not those that came in the same word.
            log.exception("a note of storage unit %d failed", unit)
            return not_taken(unexpected("note", error))

    def kept(self, partition: str) -> None:
        """Consumers that wait may have what is there."""
        self._serve(self._partitions[partition])

    @rpc
    def unkept(self, unkept: Unkept) -> None:
        """A storage unit could not keep what it had told of: no consumer gets those groups. Said late, or again, it
        changes nothing. RunError as of :meth:`note`."""
        self._units.require(unkept.unit)
        partition = self._partitions.get(unkept.partition)
        if partition is not None and partition.made == unkept.made:
            self._free(partition, partition.give_up(np.array(unkept.groups, dtype=np.int64), new=unkept.new))

    @rpc
    def lease(self, call: LeaseCall) -> Any:
        """Granted now, or by the write that makes it possible. The wait ends here and not at the caller, who could
        otherwise leave just when the lease is granted, and nobody would have the rows until it expires."""
        partition = self._partition(call.partition, call.made)
        call = partition.check(call)
        self._watch()
        waiting = partition.waiting[call.consumer]
        granted = None if len(waiting) and not partition.is_first(call) else self._grant(partition, call)
        if granted is not None:
            return granted
        future = waiting.add(call)
        self._serve(partition)
        return future

    def take_back_lease(self, call: LeaseCall, granted: Granted) -> None:
        """A consumer was gone when its rows came: another need not wait until its lease expires."""
        partition = self._partitions.get(call.partition)
        if partition is not None and call.share is None:  # of ranks, the others may have their shares
            with suppress(ValueError):  # it has expired
                self._take_back(partition, LeaseRef(call.partition, granted.lease))

    @rpc
    def look(self, call: LookCall) -> Any:
        """What a consumer could lease, now or as soon as it is enough."""
        return self._partition(call.lease.partition, call.lease.made).await_ready(call)

    @rpc
    def acknowledge(self, ref: LeaseRef) -> None:
        """The consumer is done with the rows; or one of the ranks that share them. LostRowsError when a unit has lost
        some of them, which are made anew: the lease has ended then, and the others are ready again."""
        partition = self._partition(ref.partition)
        with ended_in_words():
            try:
                done = partition.acknowledge(ref)
            except LostRowsError:
                self._take_back(partition, ref)
                raise
        if done is not None:
            held, left = done
            self._free_unread(partition, (held,))
            self._free(partition, partition.left(left))

    @rpc
    def first_batch(self, which: FirstBatch) -> int:
        """The first batch of a consumer that not every rank has acknowledged."""
        return self._partition(which.partition, which.made).first_batch(which.consumer)

    @rpc
    def release(self, ref: LeaseRef) -> None:
        """The consumer gives the rows back."""
        with ended_in_words():
            self._take_back(self._partition(ref.partition), ref)

    @rpc
    def extend(self, ref: LeaseRef) -> None:
        """The consumer needs longer. LostRowsError when it cannot acknowledge them any more."""
        check_held_for(ref.seconds)
        with ended_in_words():
            self._partition(ref.partition).extend(ref)

    @rpc
    def drop(self, groups: Groups) -> None:
        """Give whole groups up, also those on lease; those that are not there any more are skipped."""
        partition = self._partition(groups.partition, groups.made)
        self._free(partition, partition.drop(groups.groups))

    # ------------------------------------------------------------ inside

    def _take_back(self, partition: PartitionLedger, ref: LeaseRef) -> None:
        self._free_unread(partition, partition.release(ref))
        self._serve(partition)

    def _partition(self, name: str, made: int = 0) -> PartitionLedger:
        if name not in self._partitions:
            known = ", ".join(sorted(self._partitions)) or "none yet"
            raise ContractError(f"no partition {name!r}", fix=f"create it first; there are: {known}")
        check_made(name, made, self._partitions[name].made)
        return self._partitions[name]

    def _serve(self, partition: PartitionLedger) -> None:
        for waiting in partition.waiting.values():
            if len(waiting):
                waiting.serve(lambda call: self._grant(partition, call))
        for looking in partition.looking.values():
            if len(looking):
                looking.serve(partition.ready)

    def _grant(self, partition: PartitionLedger, call: LeaseCall) -> Granted | None:
        """A lease, if there is enough, with its values if they are all in this process."""
        granted = partition.grant(call)
        if granted is None or not call.columns or granted.unit != self._own_number or self._own is None:
            return granted
        try:
            values = self._own.leased(Fetch(granted.rows[0], call.columns, call.partition))
        except LostRowsError:  # whoever asks for them will hear it
            return granted
        return Granted(granted.lease, granted.rows, granted.unit, None, values, granted.shared)

    def _free(self, partition: PartitionLedger, groups: Array) -> None:
        if len(groups):
            rows = partition.ledger.rows_of(groups)
            self._units.free(rows, partition.ledger.units_of(rows))

    def free(self, partition: PartitionLedger, groups: Array) -> None:
        """These have only just left; those that nobody holds are forgotten now, others when their lease ends."""
        self._free(partition, partition.unheld(groups))

    def _free_unread(self, partition: PartitionLedger, ended: Iterable[Lease]) -> None:
        """What was left in the units because it was on lease."""
        for rows, units in partition.unread(ended):
            self._units.free(rows, units)

    def _watch(self) -> None:
        """See to it that leases expire and that units that are gone are missed: nobody else need come by."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WATCH_SECONDS, self._look)

    def _lose(self, units: list[int]) -> None:
        for unit in units:
            for partition in self._partitions.values():
                self._free(partition, partition.lose(unit))

    def _look(self) -> None:
        self._timer = None
        now = monotonic()
        self._lose(self._units.lose_silent(WATCH_SECONDS))
        for partition in self._partitions.values():
            partition.look(now)
            expired = partition.expire(now)
            self._free_unread(partition, expired)
            if expired:
                self._serve(partition)
        self._watch()
