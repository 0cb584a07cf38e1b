"""A partition as one thread sees it: put, lease, get, acknowledge, from code without an event loop."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from time import monotonic

import numpy as np

from headrace.contract import Array, Batch, StorageStats
from headrace.dataplane.asking import as_ids, as_names, check_columns, check_held_for, check_sizes, check_wait
from headrace.dataplane.connections import Connections
from headrace.dataplane.contents import Value, once_each
from headrace.dataplane.gathering import Part, join, parts
from headrace.dataplane.messages import (
    Described,
    Fetch,
    FirstBatch,
    Granted,
    Groups,
    LeaseCall,
    LookCall,
    LostCall,
    Noted,
    PartitionSpec,
    PartitionStats,
    Put,
    Ready,
    Share,
    StatsCall,
)
from headrace.dataplane.ordering import Order, lease_in_order
from headrace.dataplane.rows import Rows, check_rows, lease_ref
from headrace.dataplane.schema import check_made
from headrace.dataplane.shards import check_place
from headrace.dataplane.shared import Reading, are_large, put_shared
from headrace.dataplane.unit_clients import ASK_SECONDS, TOLD_EARLIER, UnitClients
from headrace.errors import ContractError, DeadlineError, HeadraceError, LostRowsError, WireError
from headrace.flow.group_table import UNKNOWN
from headrace.wire import BlockingClient, check_deadline

DEADLINE = 60.0
LEASE_SECONDS = 60.0
GRACE = 10.0
"""How much longer than the ledger a consumer waits for what the ledger decides."""
_ONCE = "the rows may be kept: whoever names a put by once= can put it again, and keep it once"
_NO_ROWS = np.zeros(0, np.int64)
"""Nobody knows yet which."""


class Partition:
    """A table of rows and columns. Every method waits at most ``deadline`` seconds for each answer that it needs, and
    ``GRACE`` longer for what the ledger decides, and raises DeadlineError then."""

    def __init__(self, connections: Connections, name: str, shard: tuple[int, int] = (0, 1)) -> None:
        self._connections = connections
        self.name = name
        described = self._describe()
        check_place(described, *shard)
        self.spec: PartitionSpec = described.spec
        self._made = self._made_at_units = described.made
        """At the ledger; and at units, which know the partition of all shards as one."""
        self._ledgers = described.shards
        self._units = UnitClients(connections, lambda deadline: self._describe(deadline).units)
        self._units.show(described.units)
        self._told = 0
        """Groups that :meth:`lost` has told of."""
        self._moves = 0

    @property
    def ledger(self) -> BlockingClient:
        """Of the partition's ledger."""
        return self._connections.client()

    @property
    def moves(self) -> int:
        """How often a put of this object has gone on to another unit, because its unit was gone. Each time that unit
        may have kept new rows as well, whose groups :meth:`lost` names then, and nobody else knows."""
        return self._moves

    def put(
        self,
        columns: Mapping[str, Value],
        *,
        rows: Array | Sequence[int] | None = None,
        version: int = 0,
        once: str = "",
        deadline: float = DEADLINE,
    ) -> Array:
        """Store columns of ``rows``, or of new rows, whose ids come back: whole groups, one after another, of policy
        ``version``. Answered when the values are kept and consumers can have them. It waits while the unit is full,
        and while there is none. ContractError when a column is not as the schema says, or one of ``rows`` never was.
        DeadlineError tells nothing of what became of them: put new rows ``once``, under a name, and when they are put
        again under it, by whomever, they are kept once, with the same ids. The ledger knows the newest 65,536 names, of
        no rows that were lost."""
        ids = None if rows is None else as_ids(rows, "rows of a put")
        noted = self.try_put(columns, rows=ids, version=version, once=once, deadline=deadline)
        if ids is None:
            return np.arange(noted.first, noted.first + len(next(iter(columns.values()))))
        if noted.refused is not None and (noted.refused == UNKNOWN).any():
            strangers = ids[noted.refused == UNKNOWN].tolist()
            raise ContractError(
                f"partition {self.name!r} never had row {strangers[0]}, and {len(strangers)} in all of this put's rows",
                fix="put rows that are new without rows=: their ids come back",
            )
        return ids

    def try_put(
        self,
        columns: Mapping[str, Value],
        *,
        rows: Array | Sequence[int] | None = None,
        version: int = 0,
        once: str = "",
        deadline: float = DEADLINE,
    ) -> Noted:
        """:meth:`put` that also says which rows were not wanted: written before, given up, or never there."""
        check_columns(columns)
        check_deadline(deadline)
        ids = None if rows is None else as_ids(rows, "rows of a put")
        values = once_each(self.spec.columns, columns)
        end = monotonic() + deadline
        while (left := end - monotonic()) > 0:
            number = self._units.next(left)
            wait = left - min(TOLD_EARLIER, left / 4)
            put = Put(self.name, ids, values, version, made=self._made_at_units, once=once, wait=wait)
            try:
                return self._put(number, put, left)
            except DeadlineError as error:
                self._units.ask_anew()
                error.fix = error.fix or _ONCE
                raise
            except LostRowsError as error:
                if not self._units.is_gone(number):
                    raise
                if ids is None and self._ledgers > 1 and not once:
                    # Another ledger may not have given the unit up yet, and still hear of these rows.
                    raise DeadlineError(
                        f"storage unit {number} is gone, and has not said what became of a put", fix=_ONCE
                    ) from error
                self._moves += 1
        raise DeadlineError(
            "the storage unit that was to keep rows is gone, and no time is left for another", fix=_ONCE
        )

    def _put(self, number: int, put: Put, deadline: float) -> Noted:
        client = self._units.client(number, deadline, _NO_ROWS)
        meanwhile = self._units.meanwhile(number, _NO_ROWS)
        if are_large(put.columns):
            segments = self._units.segments(number, deadline, _NO_ROWS)
            noted = segments and put_shared(client, segments, put, put.columns, deadline=deadline, meanwhile=meanwhile)
            if noted:
                return noted
        awaiting = "a storage unit to keep rows"
        try:
            return client.call("put", put, reply=Noted, deadline=deadline, awaiting=awaiting, meanwhile=meanwhile)
        except ContractError:
            check_sizes(put.columns)  # says which it is
            raise

    def lease(
        self,
        consumer: str,
        groups: int,
        *,
        at_least: int | None = None,
        token_budget: int = 0,
        min_version: int = 0,
        seconds: float = LEASE_SECONDS,
        share: Share | None = None,
        order: Order | None = None,
        deadline: float = DEADLINE,
    ) -> Rows:
        """Up to ``groups`` groups, as soon as there are ``at_least`` (default: all of them), held for ``seconds``.
        ``share``: a rank's part of a batch of so many groups, of which ranks get about equal numbers of tokens, each at
        most ``token_budget``. It is the same however often and in whatever order ranks ask for theirs. RunError when
        every rank has acknowledged it. ``order``: of the consumer's own, instead of the oldest first; see
        :mod:`headrace.dataplane.ordering`."""
        enough = groups if at_least is None else at_least
        call = LeaseCall(
            self.name,
            consumer,
            groups,
            enough,
            deadline,
            seconds,
            token_budget,
            min_version,
            share=share,
            made=self._made,
        )
        rows, _ = self._lease(call, order)
        return rows

    def take(
        self,
        consumer: str,
        groups: int,
        *,
        columns: Sequence[str] | None = None,
        at_least: int | None = None,
        token_budget: int = 0,
        min_version: int = 0,
        seconds: float = LEASE_SECONDS,
        share: Share | None = None,
        order: Order | None = None,
        deadline: float = DEADLINE,
    ) -> tuple[Rows, Batch]:
        """:meth:`lease` and :meth:`get`; in one word where the values are in the ledger's process. ``deadline`` is
        for rows to be there; their values may take as long, or half as long as the lease, up to ``GRACE``, if that is
        more. When the values cannot be had
        the rows are given back, and what :meth:`get` raises is raised."""
        reads = self.spec.consumers.get(consumer, ())
        wanted = reads if columns is None else as_names(columns, f"consumer {consumer!r}")
        enough = groups if at_least is None else at_least
        call = LeaseCall(
            self.name,
            consumer,
            groups,
            enough,
            deadline,
            seconds,
            token_budget,
            min_version,
            wanted,
            share,
            made=self._made,
        )
        rows, batch = self._lease(call, order)
        if batch is not None:
            return rows, batch
        try:
            return rows, self.get(rows, wanted, deadline=max(deadline, min(GRACE, seconds / 2)))
        except BaseException:  # nobody else could know of the lease; raised again
            with suppress(HeadraceError):  # what was wrong may be wrong with the ledger too
                self.release(rows)
            raise

    def _lease(self, call: LeaseCall, order: Order | None) -> tuple[Rows, Batch | None]:
        check_wait(call.wait)
        check_held_for(call.seconds)
        return self._obtain(call) if order is None else self._obtain_in_order(call, order)

    def _obtain_in_order(self, call: LeaseCall, order: Order) -> tuple[Rows, Batch | None]:
        return lease_in_order(call, order, look=self._candidates, lease=self._obtain)

    def _candidates(self, call: LookCall) -> Ready:
        awaiting = f"{call.at_least} groups for {call.lease.consumer}"
        return self.ledger.call("look", call, reply=Ready, deadline=call.wait + GRACE, awaiting=awaiting)

    def _obtain(self, call: LeaseCall) -> tuple[Rows, Batch | None]:
        granted = self.ledger.call(
            "lease",
            call,
            reply=Granted,
            deadline=call.wait + GRACE,
            awaiting=f"{call.at_least} groups for {call.consumer}",
        )
        ids, tokens, attempts = granted.rows
        rows = Rows(
            partition=self.name,
            lease=granted.lease,
            consumer=call.consumer,
            rows=ids,
            tokens=tokens,
            attempts=attempts,
            unit=granted.unit,
            units=granted.units,
            groups=granted.shared or len(ids) // (1 if call.consumer in self.spec.by_row else self.spec.group_size),
            share=call.share,
        )
        return rows, None if granted.values is None else Batch(rows=ids, columns=granted.values)

    def get(self, held: Rows, columns: Sequence[str] | None = None, *, deadline: float = DEADLINE) -> Batch:
        """Values of leased rows: ``columns``, by default all that the consumer reads. LostRowsError when a unit has
        lost them, ContractError when they are of a ledger's earlier life. Arrays may be read-only views of memory that
        the unit shares; they are valid until the rows are acknowledged or released, or the lease expires."""
        check_rows(held, self.name)
        reads = self.spec.consumers[held.consumer]
        wanted = reads if columns is None else as_names(columns, f"consumer {held.consumer!r}")
        for column in wanted:
            if column not in reads:
                raise ContractError(
                    f"consumer {held.consumer!r} of partition {self.name!r} asks for {column!r}",
                    fix=f"it reads {', '.join(reads)}",
                )
        try:
            if held.units is None:
                return self._fetch(held.unit, held.rows, wanted, deadline)
            return self._gather(held.rows, wanted, held.units[:, [reads.index(column) for column in wanted]], deadline)
        except LostRowsError:
            self._require_made(min(deadline, ASK_SECONDS))
            raise

    def _require_made(self, deadline: float) -> None:
        """ContractError when the partition is gone: its rows went with it, and nobody lost them."""
        with suppress(WireError):  # whoever cannot tell has not said so
            check_made(self.name, self._made, self._describe(deadline).made)

    def _fetch(self, unit: int, rows: Array, columns: tuple[str, ...], deadline: float) -> Batch:
        reading = self._ask(unit, rows, columns, deadline)
        with self._units.noticing(unit, rows, deadline):
            return reading.batch()

    def _ask(self, unit: int, rows: Array, columns: tuple[str, ...], deadline: float) -> Reading:
        client = self._units.client(unit, deadline, rows)
        meanwhile = self._units.meanwhile(unit, rows)
        with self._units.noticing(unit, rows, deadline):
            segments = self._units.segments(unit, deadline, rows)
            fetch = Fetch(rows, columns, self.name, self._made_at_units)
            return Reading(client, segments, fetch, deadline=deadline, meanwhile=meanwhile)

    def _gather(self, rows: Array, columns: tuple[str, ...], units: Array, deadline: float) -> Batch:
        """From several units at once."""
        asked: list[tuple[Part, Reading]] = []
        found: list[tuple[Part, Batch]] = []
        try:
            for part in parts(units, columns):
                asked.append((part, self._ask(part.unit, rows[part.at], part.columns, deadline)))
            while asked:
                part, reading = asked.pop(0)
                with self._units.noticing(part.unit, rows[part.at], deadline):
                    found.append((part, reading.batch()))
        finally:
            for _, reading in asked:
                reading.cancel()
        return join(rows, columns, found)

    def acknowledge(self, held: Rows, *, deadline: float = DEADLINE) -> None:
        """The consumer is done with the rows. RunError when the lease ended before: others have, or get, them.
        LostRowsError when a unit has lost some of them meanwhile, which are made anew: the lease has ended then, and
        others get the rest. Where ranks share a batch it is acknowledged when each of them has said so."""
        self._tell("acknowledge", lease_ref(self.name, held), deadline)

    def release(self, held: Rows, *, deadline: float = DEADLINE) -> None:
        """Give the rows back, to be leased again; where ranks share batches, those of all ranks, and of later batches
        too."""
        self._tell("release", lease_ref(self.name, held), deadline)

    def extend(self, held: Rows, seconds: float = LEASE_SECONDS, *, deadline: float = DEADLINE) -> None:
        """Hold on to the rows for ``seconds`` from now. A batch that ranks share is held as long as each of them does
        that has asked for a share and not acknowledged it."""
        check_held_for(seconds)
        self._tell("extend", lease_ref(self.name, held, seconds), deadline)

    def first_batch(self, consumer: str, *, deadline: float = DEADLINE) -> int:
        """Where ranks that share a consumer's batches begin, or go on: with the first that not every one of them has
        acknowledged."""
        which = FirstBatch(self.name, consumer, self._made)
        return self.ledger.call(
            "first_batch", which, reply=int, deadline=deadline, awaiting="the ledger to say where to begin"
        )

    def drop(self, groups: Sequence[int], *, deadline: float = DEADLINE) -> None:
        """Give whole groups up: no consumer gets them any more. Who holds them may read them until the lease ends."""
        self._tell("drop", Groups(self.name, as_ids(groups, "groups").tolist(), self._made), deadline)

    def lost(self, *, wait: float = 0.0, deadline: float = DEADLINE) -> list[int]:
        """Groups whose values went with a storage unit and that this object has not told of; waits up to ``wait``
        seconds for some. No consumer gets them any more: make them anew. A new object begins with the first that ever
        was lost: whoever takes another's place hears what that one had heard."""
        check_wait(wait)
        check_deadline(deadline)
        call = self.lost_call(wait)
        lost = self.ledger.call("lost", call, reply=list[int], deadline=deadline + wait, awaiting="news of lost rows")
        self._told += len(lost)
        return lost

    def lost_call(self, wait: float) -> LostCall:
        """What :meth:`lost` asks."""
        return LostCall(self.name, self._made, wait, self._told)

    def stats(self, *, deadline: float = DEADLINE) -> PartitionStats:
        """Rows, bytes, leases, what is ready and who waits."""
        call = StatsCall(self.name, self._made)
        return self.ledger.call("stats", call, reply=PartitionStats, deadline=deadline, awaiting="the ledger's figures")

    def unit_stats(self, *, deadline: float = DEADLINE) -> list[StorageStats]:
        """Rows and bytes that each unit holds, of all partitions."""
        self._units.learn(deadline)
        return [
            self._connections.client(address).call(
                "unit_stats", reply=StorageStats, deadline=deadline, awaiting="a unit's figures"
            )
            for address in self._units.addresses
            if address
        ]

    def _tell(self, method: str, request: object, deadline: float) -> None:
        self.ledger.call(method, request, deadline=deadline, awaiting="the ledger")

    def _describe(self, deadline: float = DEADLINE) -> Described:
        return self.ledger.call(
            "describe", self.name, reply=Described, deadline=deadline, awaiting="the description of a partition"
        )
