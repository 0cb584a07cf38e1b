"""A storage unit as a service: column values, a bound in bytes, and word to the ledger.

A put is answered after the ledger knows of the rows and the storage keeps them. When the unit is full, puts of new
rows wait in order until rows are deleted; new columns of rows that are there never wait, since it is them that lets
rows leave. One that waits, and whose producer is gone, is dropped. Invariant: a value is kept only when the ledger has
taken the row.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import Callable, Mapping
from functools import lru_cache
from math import inf
from typing import Any, TypeVar

import numpy as np

from headrace.contract import Array, Batch, Column, Region, Repeated, Storage, StorageStats
from headrace.dataplane.contents import Contents, Value, batch_of, values_of
from headrace.dataplane.links import LedgerLink, settled
from headrace.dataplane.messages import Described, Fetch, Join, Noted, Notes, Put, UnitFigures, Unkept
from headrace.dataplane.pending import Pending
from headrace.dataplane.refusals import full, lost_rows, too_large
from headrace.dataplane.schema import Schema, check_made
from headrace.dataplane.traffic import PUT, SENT, Traffic
from headrace.errors import DeadlineError, HeadraceError, LostRowsError, RunError
from headrace.wire import rpc
from headrace.wire.failures import from_failure

T = TypeVar("T")

BEAT_SECONDS = 1.0
KEPT_FREE_BYTES = 256 << 20
"""Of memory that a unit's process has freed: as much stays with it for the next puts."""


class UnitService:
    """``capacity``: bytes, above which new rows wait; 0 for no bound."""

    def __init__(self, storage: Storage, *, ledger: LedgerLink, capacity: int = 0) -> None:
        self._storage = storage
        self._contents = Contents(storage)
        """What rows are put into, and read from."""
        self._ledger = ledger
        self._capacity = capacity
        self._traffic = Traffic()
        self._number = 0
        """0: the ledger does not know the unit yet."""
        self._process = secrets.token_hex(8)
        self._schemas: dict[str, Schema] = {}
        self._coming = 0
        """Bytes that the ledger is being told of."""
        self._full: deque[Pending] = deque()
        self._noting: list[Pending] = []
        """To be told to the ledger when it has answered."""
        self._turn = 0
        self._told: asyncio.Future[list[Noted]] | None = None
        """Word to the ledger that is under way."""
        self.refused: Mapping[str, int] = {}
        """What the server turned away that serves the unit; said by whoever makes it."""
        self._deleted: list[list[int]] = []
        """Rows that left the ledger meanwhile, and that it may have taken with that word."""

    async def join(self, address: str) -> None:
        """Make the unit known: it is reached at ``address``."""
        self.numbered(await settled(self._ledger.join(Join(address, self._process, self._number > 0))))

    def numbered(self, number: int) -> None:
        """The ledger knows the unit by this number; what was put before is told now."""
        self._number = number
        if self._noting and self._told is None:
            self._tell()

    async def stay(self, address: str) -> None:
        """Say every second that the unit is there. Ends with RunError when the ledger has given it up, and with
        DeadlineError when the ledger is gone."""
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await self.join(address)

    # ------------------------------------------------------------ producers

    @rpc
    def put(self, put: Put) -> Any:
        """Keep values. ContractError, and nothing kept, when they are not what the partition's schema says."""
        return self._take(put)

    def _take(self, put: Put, region: Region | None = None) -> Any:
        pending = Pending(put, region)
        self._admit(pending)
        return pending.answer()

    def _admit(self, pending: Pending, *, learned: bool = False) -> None:
        """Go on with a put, or have it wait for room. ``learned``: its partition's schema was just asked for."""
        put, schema = pending.put, self._schemas.get(pending.put.partition)
        try:
            if schema is not None:
                pending.check(schema)
        except HeadraceError as error:
            if learned:
                self._end(pending, error)
                return
            schema = None  # there may be another partition of this name by now
        if schema is None:
            self._learn(pending)
            return
        new = put.rows is None or put.fresh
        if not (new and self._capacity) or self._has_room(pending.nbytes):
            self._note(pending)
        elif pending.nbytes > self._capacity:
            self._end(pending, too_large(pending.nbytes, self._capacity))
        else:
            self._full.append(pending)
            pending.promise().add_done_callback(lambda _: self._leave(pending))
            if 0 < put.wait < inf:
                timer = asyncio.get_running_loop().call_later(put.wait, self._no_room, pending)
                pending.promise().add_done_callback(lambda _: timer.cancel())

    def _no_room(self, pending: Pending) -> None:
        """One has waited as long as it was to."""
        if pending in self._full:
            held = self._storage.stats().nbytes + self._coming
            pending.end(full(self._number, held, self._capacity, len(self._full), pending))

    def _leave(self, pending: Pending) -> None:
        """One that waited for room has gone on, or given up."""
        if pending in self._full:
            self._full.remove(pending)
            self._discard(pending.region)
            self._go_on()

    def _end(self, pending: Pending, error: BaseException) -> None:
        """It is not kept."""
        self._discard(pending.region)
        pending.end(error)

    def _discard(self, region: Region | None) -> None:
        """A put ends, and its values are not kept where they lie."""

    def _has_room(self, nbytes: int) -> bool:
        if self._full:
            self._go_on()
        return not self._full and self._fits(nbytes)

    def _fits(self, nbytes: int) -> bool:
        return self._storage.stats().nbytes + self._coming + nbytes <= self._capacity

    def _learn(self, pending: Pending) -> None:
        """The first of a partition, or one that its schema does not fit: ask for the schema."""
        try:
            described = self._ledger.describe(pending.put.partition)
        except HeadraceError as error:
            self._end(pending, error)
            return
        if isinstance(described, asyncio.Future):
            described.add_done_callback(lambda done: self._heard_schema(pending, done))
        else:
            self._learned(pending, described)

    def _heard_schema(self, pending: Pending, described: asyncio.Future[Described]) -> None:
        error = _closed() if described.cancelled() else described.exception()
        if error is None:
            self._learned(pending, described.result())
        else:
            self._end(pending, error)

    def _learned(self, pending: Pending, described: Described) -> None:
        try:
            self._schemas[described.spec.name] = Schema(described.spec, made=described.made)
        except HeadraceError as error:
            self._end(pending, error)
            return
        self._admit(pending, learned=True)

    def _note(self, pending: Pending) -> None:
        self._coming += pending.nbytes
        self._noting.append(pending)
        if self._number and self._told is None:
            self._tell()

    def _tell(self) -> None:
        """One word at a time: what comes in while a ledger elsewhere is busy goes into the next, unless its producer
        gave up meanwhile, and puts it again."""
        noting, self._noting = self._noting, []
        if given_up := [pending for pending in noting if pending.given_up]:
            self._refused(given_up, _gone())
            noting = [pending for pending in noting if not pending.given_up]
        if noting:
            self._turn += 1
            self._say(Notes(self._number, [pending.note for pending in noting], self._turn), noting)

    def _say(self, notes: Notes, noting: list[Pending]) -> None:
        try:
            noted = self._ledger.note(notes)
        except HeadraceError as error:
            self._told = None
            self._refused(noting, error)
            return
        if isinstance(noted, asyncio.Future):
            self._told = noted
            noted.add_done_callback(lambda done: self._heard(done, notes, noting))
        else:
            self._keep_all(noting, noted)

    def _heard(self, call: asyncio.Future[list[Noted]], notes: Notes, noting: list[Pending]) -> None:
        error = _closed() if call.cancelled() else call.exception()
        if isinstance(error, DeadlineError):  # the ledger may have taken the rows: what it answered is to be known
            self._say(notes, noting)
            return
        self._told = None
        if self._noting:
            self._tell()
        if error is not None:
            self._refused(noting, error)
        else:
            self._keep_all(noting, call.result())
        for rows in self._deleted:
            self._contents.delete(rows)
        self._deleted.clear()

    def _refused(self, noting: list[Pending], error: BaseException) -> None:
        for pending in noting:
            self._refuse(pending, error)
        asyncio.get_running_loop().call_soon(self._go_on)

    def _refuse(self, pending: Pending, error: BaseException) -> None:
        self._coming -= pending.nbytes
        self._end(pending, error)

    def _keep_all(self, noting: list[Pending], noted: list[Noted]) -> None:
        partitions = set()
        for pending, answer in zip(noting, noted, strict=True):
            if answer.failed is not None:
                self._refuse(pending, from_failure(answer.failed))
                continue
            if answer.remade:
                self._again(pending)
                continue
            self._keep(pending, answer)
            partitions.add(pending.put.partition)
        for partition in partitions:
            self._ledger.kept(partition)
        if self._full:  # what was not kept has left room
            asyncio.get_running_loop().call_soon(self._go_on)

    def _again(self, pending: Pending) -> None:
        """A put whose partition is another one by now."""
        self._coming -= pending.nbytes
        self._learn(pending)

    def _keep(self, pending: Pending, noted: Noted) -> None:
        self._coming -= pending.nbytes
        rows = pending.put.rows
        if rows is None:
            rows = np.arange(noted.first, noted.first + pending.note.count)
        kept = None if noted.refused is None else np.flatnonzero(noted.refused == 0)
        try:
            self._store(pending, rows, kept)
        except Exception as error:  # of a plugin: whoever put it is told, and the ledger
            self._unkept(pending, rows if kept is None else rows[kept])
            self._end(pending, error)
            return
        self._traffic.add(PUT, pending.put.partition, pending.put.columns)
        pending.end(noted)

    def _store(self, pending: Pending, rows: Array, kept: Array | None) -> None:
        """``kept``: places of the rows that the ledger has taken; None for all."""
        put = pending.put
        names = stored_names(put.partition, pending.note.columns)
        batch = batch_of(rows, dict(zip(names, put.columns.values(), strict=True)))
        self._contents.put(batch if kept is None else batch.take(kept))

    def _unkept(self, pending: Pending, rows: Array) -> None:
        groups = np.unique(rows // pending.schema.group_size).tolist()
        new = pending.put.rows is None
        self._ledger.unkept(Unkept(self._number, pending.put.partition, pending.schema.made, groups, new))

    # ------------------------------------------------------------ consumers

    def read(self, fetch: Fetch) -> Batch:
        """What the unit keeps. LostRowsError when it does not keep all of it."""
        return batch_of(fetch.rows, self._values(fetch))

    def _values(self, fetch: Fetch) -> dict[str, Value]:
        names = stored_names(fetch.partition, fetch.columns)
        try:
            found = values_of(self._contents.get(fetch.rows.tolist(), names))
        except KeyError as error:
            raise lost_rows(fetch) from error
        return {column: found[name] for column, name in zip(fetch.columns, names, strict=True)}

    def leased(self, fetch: Fetch) -> dict[str, Column] | None:
        """What goes along with a lease; None when it is better fetched."""
        values: dict[str, Column] = {}
        for name, value in self._values(fetch).items():
            if isinstance(value, Repeated):
                return None
            values[name] = value
        self._traffic.add(SENT, fetch.partition, values)
        return values

    @rpc
    def segments(self, request: None) -> str:
        """The directory of the memory that this unit shares; "" for none."""
        return ""

    @rpc
    def get(self, fetch: Fetch) -> Any:
        """Read."""
        return self._when_kept(fetch, self._sent)

    def _sent(self, fetch: Fetch) -> Batch:
        batch = self.read(fetch)
        self._traffic.add(SENT, fetch.partition, values_of(batch))
        return batch

    def _when_kept(self, fetch: Fetch, read: Callable[[Fetch], T]) -> T | asyncio.Future[T]:
        schema = self._schemas.get(fetch.partition)
        if schema is not None:
            check_made(fetch.partition, fetch.made, schema.made)
        try:
            return read(fetch)
        except LostRowsError:
            if self._told is None:
                raise
            return asyncio.ensure_future(_later(fetch, read, self._told))

    @rpc
    def delete(self, rows: Array) -> None:
        """Free; puts that waited for room go on."""
        self._contents.delete(rows.tolist())
        if self._told is not None:
            self._deleted.append(rows.tolist())
        self._go_on()

    def _go_on(self) -> None:
        """Puts for which there is room now. One whose producer is gone is not kept, and holds nobody up."""
        while self._full:
            first = self._full[0]
            if not first.is_awaited():
                self._full.popleft()
                self._end(first, _gone())
            elif self._fits(first.nbytes):
                self._full.popleft()
                self._note(first)
            else:
                return

    @rpc
    def unit_stats(self, request: None) -> StorageStats:
        """Rows and bytes held."""
        return self._contents.stats()

    @rpc
    def figures(self, request: None) -> UnitFigures:
        """How full the unit is."""
        held = self._contents.stats()
        waiting = sum(pending.nbytes for pending in self._full)
        return UnitFigures(
            held.rows,
            held.nbytes,
            self._capacity,
            len(self._full),
            waiting,
            dict(self.refused),
            self._traffic.so_far(),
        )

    async def close(self) -> None:
        """Waiting producers are told."""
        while self._full:
            self._end(self._full.popleft(), RunError("the storage unit was closed while a put waited for room"))
        self._storage.close()


@lru_cache(maxsize=1024)
def stored_names(partition: str, columns: tuple[str, ...]) -> tuple[str, ...]:
    """What a storage calls columns, in whose own names is no slash: partitions may name different kinds alike."""
    return tuple(f"{partition}/{column}" for column in columns)


def _gone() -> RunError:
    return RunError("whoever put these rows is gone")


def _closed() -> RunError:
    return RunError("the unit was closed")


async def _later(fetch: Fetch, read: Callable[[Fetch], T], told: asyncio.Future[list[Noted]]) -> T:
    """The ledger may have offered rows whose acceptance is still on its way here."""
    await asyncio.wait([told])  # by then it was heard, whose callback is the older one, and its values are kept
    return read(fetch)
