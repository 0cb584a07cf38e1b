"""One partition at the ledger: its rows, and the calls of its consumers that wait."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import monotonic

import numpy as np

from headrace.contract import Array
from headrace.dataplane.asking import check_held_for, check_wait
from headrace.dataplane.gathering import sole_unit
from headrace.dataplane.messages import (
    Granted,
    LeaseCall,
    LeaseRef,
    LookCall,
    Note,
    Noted,
    PartitionSpec,
    PartitionState,
    Ready,
)
from headrace.dataplane.named_puts import NamedPuts
from headrace.dataplane.refusals import lost_on_lease
from headrace.dataplane.shards import MADE_BITS, SHARD_BITS, first_row
from headrace.dataplane.sharing import Sharing
from headrace.dataplane.waiting import Waiting
from headrace.errors import ContractError, RunError
from headrace.flow.ages import Ages
from headrace.flow.group_table import UNKNOWN
from headrace.flow.leases import Lease, Leases
from headrace.flow.ledger import Ledger

_EPOCH_BITS, _LEASE_BITS = 20, 32


@dataclass(slots=True, eq=False)
class _Leaving:
    """``leases``: that hold the group; ``units``: int16 [rows, columns], who has what; ``lost``: some unit has not what
    it had."""

    leases: int
    rows: Array
    units: Array
    lost: bool


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
        self.waiting = {name: Waiting(ledger.ready) for name in spec.consumers}
        self.looking = {name: Waiting(ledger.ready) for name in spec.consumers}
        self._leaving: dict[int, _Leaving] = {}
        """Groups that left while they were on lease."""
        self._lost: list[int] = []
        """Every group that ever was, in order."""
        self._asking: dict[asyncio.Future[list[int]], int] = {}
        """Who waits for more of them, and how many each has seen."""
        self.ages = Ages()
        self.made = secrets.randbits(MADE_BITS)
        """Tells it from others of its name, those of ledgers that were here before too, whose row ids were the same."""
        self._sharing = Sharing(ledger, self._granted)
        self._named = NamedPuts(spec.group_size)

    @classmethod
    def make(cls, spec: PartitionSpec, *, shard: int, number: int) -> PartitionLedger:
        """An empty one, the ``number``-th of its shard."""
        ledger = Ledger(
            group_size=spec.group_size,
            columns=tuple(spec.columns),
            consumers=spec.consumers,
            writes=spec.writes,
            by_row=spec.by_row,
            first_group=first_row(shard, number) // spec.group_size + 1,
        )
        # What a consumer holds of a ledger that was here before is not taken for a lease of this one.
        ledger.leases = Leases((shard << SHARD_BITS) + (secrets.randbits(_EPOCH_BITS) << _LEASE_BITS))
        return cls(spec, ledger)

    def state(self) -> PartitionState:
        """This moment. RunError while not all is back that an earlier ledger had: it would never be whole."""
        if self.ledger.awaited:
            raise RunError(
                f"partition {self.spec.name!r} is being restored and not whole yet",
                fix="take a snapshot when DataPlane.restore has returned",
            )
        state = self.ledger.state()
        rows = self.ledger.rows_of(state.groups)
        units, nbytes = self.ledger.units_of(rows), self.ledger.nbytes_of(rows)
        return PartitionState(
            self.spec, state, units, nbytes, list(self._lost), self._sharing.firsts(), self._named.state()
        )

    def restore(self, state: PartitionState) -> None:
        """Continue an earlier one, in an empty one: rows are given out when all values that it had have been put."""
        self.ledger.restore(state.ledger)
        self._lost += state.lost
        self._sharing.restore(state.batches)
        self._named.restore(state.named)

    def end(self) -> Iterator[tuple[Array, Array]]:
        """It is over. Returns rows that units have, those on lease too, and who has which of their columns."""
        for waiting in [*self.waiting.values(), *self.looking.values()]:
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
        for waiting in (self.waiting[consumer], self.looking[consumer]):
            waiting.end(RunError(f"{consumer} was lost", fix="its successor asks anew"))
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
        reads = self._columns_of(call.consumer)
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
        if call.chosen is not None and (call.chosen.dtype != np.int64 or call.chosen.ndim != 1):
            raise ContractError(
                f"a lease chooses groups that are {call.chosen.dtype} {list(call.chosen.shape)}",
                fix="name them as int64 [n]",
            )
        check_wait(call.wait)
        check_held_for(call.seconds)
        return call if call.share is None else self._sharing.check(call, call.share)

    def is_first(self, call: LeaseCall) -> bool:
        """Whether it is answered before those that wait: it asks for what was chosen of what is ready, or for a batch
        that is shared and was cut when another asked for it."""
        return call.chosen is not None or (call.share is not None and self._sharing.is_cut(call, call.share))

    def _columns_of(self, consumer: str) -> tuple[str, ...]:
        reads = self.spec.consumers.get(consumer)
        if reads is None:
            raise ContractError(
                f"partition {self.spec.name!r} has no consumer {consumer!r}",
                fix=f"its consumers are {', '.join(self.spec.consumers)}",
            )
        return reads

    def first_batch(self, consumer: str) -> int:
        """The first batch that not every rank has acknowledged. ContractError for a consumer that there is not."""
        self._columns_of(consumer)
        return self._sharing.first(consumer)

    def acknowledge(self, ref: LeaseRef) -> tuple[Lease, Array] | None:
        """The lease that ends and the groups that every consumer is done with; None while other ranks share the batch.
        ValueError when it is not held; LostRowsError when some of its groups were lost."""
        self._refuse_lost(ref)
        if ref.holder is not None:
            return self._sharing.acknowledge(ref.lease, ref.holder)
        return self.ledger.acknowledge(ref.lease)

    def release(self, ref: LeaseRef) -> tuple[Lease, ...]:
        """The leases that end: where ranks share batches, those of all that are later too. ValueError when it is not
        held."""
        if ref.holder is not None:
            return self._sharing.release(ref.lease, ref.holder)
        return (self.ledger.release(ref.lease),)

    def left(self, groups: Array) -> Array:
        """Every consumer is done with these. Returns those to be freed now."""
        # Somebody holds them still only where consumers are done by what is written.
        return self.unheld(groups) if len(groups) and self.spec.writes else groups

    def extend(self, ref: LeaseRef) -> None:
        """ValueError when the lease is not held; LostRowsError when some of its groups were lost."""
        self._refuse_lost(ref)
        until = monotonic() + ref.seconds
        if ref.holder is not None:
            self._sharing.extend(ref.lease, ref.holder, until)
        else:
            self.ledger.extend(ref.lease, deadline=until)

    def waiting_calls(self, consumer: str) -> int:
        """How many wait for rows, or for the news that there are some."""
        return len(self.waiting[consumer]) + len(self.looking[consumer])

    def longest_wait(self, consumer: str, now: float) -> float:
        """For how many seconds the one that waits longest has; 0 when none does."""
        return max(self.waiting[consumer].longest(now), self.looking[consumer].longest(now))

    def await_ready(self, call: LookCall) -> Ready | asyncio.Future[Ready]:
        """What there is to lease, or a promise of it. ContractError as of :meth:`check`."""
        self.check(call.lease)
        check_wait(call.wait)
        found = self.ready(call)
        return self.looking[call.lease.consumer].add(call) if found is None else found

    def ready(self, call: LookCall) -> Ready | None:
        """None when it is less than is asked for, or nothing new."""
        consumer, min_version = call.lease.consumer, call.lease.min_version
        ready = {} if self.ledger.awaited else self.ledger.ready(consumer)
        found = {version: count for version, count in ready.items() if version >= min_version}
        if sum(found.values()) < call.at_least:
            return None
        if call.after is None:
            return Ready(found)
        became = self.ledger.became_ready(consumer)
        if became <= call.after:
            return None
        return Ready(found, self.ledger.candidates(consumer, min_version=min_version), became)

    def drop(self, groups: Iterable[int]) -> Array:
        """Whole groups are given up. Returns those to be freed now."""
        dropped = [group for group in dict.fromkeys(groups) if self.ledger.is_open(group)]
        for group in dropped:
            self.ledger.drop(group)
        return self.unheld(np.array(dropped, dtype=np.int64))

    def lose(self, unit: int) -> Array:
        """A unit is gone with its values. Returns the groups whose others are to be freed now."""
        groups = self.ledger.lose(unit)
        self._named.forget(groups)
        self._name_lost(groups.tolist())
        return self.unheld(groups, lost=True)

    def _refuse_lost(self, ref: LeaseRef) -> None:
        """LostRowsError when groups were lost while this lease held them; ValueError when it is not held."""
        if self._leaving:
            held = self.ledger.leases.get(ref.lease).groups.tolist()
            if lost := [group for group in held if group in self._leaving and self._leaving[group].lost]:
                raise lost_on_lease(ref, lost)

    def unheld(self, groups: Array, *, lost: bool = False) -> Array:
        """Those of groups that left which no lease holds: what may be read under a lease stays until it ends."""
        held = self.ledger.leases.holders(groups)
        for group, leases in held.items():
            rows = self.ledger.rows_of(np.array([group]))
            self._leaving[group] = _Leaving(leases, rows, self.ledger.units_of(rows), lost)
        return groups[~np.isin(groups, list(held))]

    def unread(self, ended: Iterable[Lease]) -> Iterator[tuple[Array, Array]]:
        """Leases have ended: rows that left under them and that no other holds, and who has which of their columns."""
        for group in (group for lease in ended for group in lease.groups.tolist()) if self._leaving else ():
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
        if self._named.forget(gone) or not new:  # a put of that name may have been answered meanwhile
            self._name_lost(gone.tolist())
        return self.unheld(gone, lost=True)

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
        if note.once and (known := self._named.find(note.once, note.count)) is not None:
            return known
        if self.ledger.awaited:
            return self._note_returned(note, unit)
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
        if note.once:
            self._named.add(note.once, first, note.count)
        return Noted(first)

    def _note_returned(self, note: Note, unit: int) -> Noted:
        """RunError for what was not there before: its producer is too early."""
        outcome = (
            None if note.rows is None else self.ledger.place(note.rows, note.columns, nbytes=note.nbytes, unit=unit)
        )
        if note.rows is None or outcome is None or (outcome == UNKNOWN).any():
            raise RunError(
                f"partition {self.spec.name!r} is being restored and takes only what it had",
                fix="put other rows when DataPlane.restore has returned",
            )
        return Noted(refused=outcome if outcome.any() else None)

    def grant(self, call: LeaseCall) -> Granted | None:
        """A lease, if there is enough."""
        if self.ledger.awaited:
            return None
        if call.share is not None:
            return self._sharing.grant(call, call.share)
        lease = self.ledger.lease(
            call.consumer,
            call.groups,
            deadline=monotonic() + call.seconds,
            at_least=call.at_least,
            token_budget=call.token_budget or None,
            min_version=call.min_version or None,
            strict=call.strict,
            chosen=call.chosen,
        )
        return None if lease is None else self._granted(lease)

    def _granted(self, lease: Lease, shared: int = 0) -> Granted:
        table, units = self.ledger.contents(lease)
        reads = self._reads[lease.consumer]
        if reads is not None:
            units = units[:, reads]
        unit = sole_unit(units)
        return Granted(lease.lease, table, unit, None if unit else units, shared=shared)


def _nothing(promise: asyncio.Future[list[int]]) -> None:
    if not promise.done():
        promise.set_result([])
