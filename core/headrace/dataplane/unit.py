"""A storage unit as a service: column values, a bound in bytes, and word to the ledger.

A put is answered after the ledger knows of the rows and the storage keeps them. When the unit is full, puts of new
rows wait in order until rows are deleted; new columns of rows that are there never wait, since it is them that lets
rows leave. Invariant: a value is kept only when the ledger has taken the row.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any, NamedTuple

import numpy as np

from headrace.contract import Array, Batch, Storage, StorageStats
from headrace.dataplane.links import LedgerLink, settled
from headrace.dataplane.messages import Described, Fetch, Note, Noted, Notes, Put
from headrace.dataplane.schema import Schema
from headrace.errors import HeadraceError, LostRowsError, RunError
from headrace.wire import rpc

BEAT_SECONDS = 1.0


class _Pending(NamedTuple):
    put: Put
    nbytes: Array
    answer: asyncio.Future[Noted]


class UnitService:
    """``capacity``: bytes, above which new rows wait; 0 for no bound."""

    def __init__(self, storage: Storage, *, ledger: LedgerLink, capacity: int = 0) -> None:
        self._storage = storage
        self._ledger = ledger
        self._capacity = capacity
        self._number = 0
        self._schemas: dict[str, Schema] = {}
        self._nbytes = 0
        """Kept, or about to be."""
        self._full: deque[_Pending] = deque()
        self._noting: list[_Pending] = []
        """To be told to the ledger when it has answered."""
        self._told: asyncio.Future[list[Noted]] | None = None
        """Word to the ledger that is under way."""

    async def join(self, address: str) -> None:
        """Make the unit known: it is reached at ``address``."""
        self.numbered(await settled(self._ledger.join(address)))

    def numbered(self, number: int) -> None:
        """The ledger knows the unit by this number."""
        self._number = number

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
        schema = self._schemas.get(put.partition)
        if schema is None:
            return self._learn(put)
        nbytes = schema.check(put)
        pending = _Pending(put, nbytes, asyncio.get_running_loop().create_future())
        if put.rows is None and not self._has_room(int(nbytes.sum())):
            self._full.append(pending)
        else:
            self._note(pending)
        return pending.answer

    def _has_room(self, nbytes: int) -> bool:
        if not self._capacity:
            return True
        if nbytes > self._capacity:
            raise RunError(
                f"a put of {nbytes} bytes can never fit a storage unit of {self._capacity}",
                fix="put fewer rows at once, or give the unit a larger capacity",
            )
        return not self._full and self._nbytes + nbytes <= self._capacity

    def _learn(self, put: Put) -> Any:
        """The first of a partition: ask for its schema."""
        described = self._ledger.describe(put.partition)
        if isinstance(described, asyncio.Future):
            return asyncio.ensure_future(self._learn_later(put, described))
        self._schemas[put.partition] = Schema(described.spec)
        return self.put(put)

    async def _learn_later(self, put: Put, described: asyncio.Future[Described]) -> Noted:
        self._schemas[put.partition] = Schema((await described).spec)
        answer: Noted = await self.put(put)
        return answer

    def _note(self, pending: _Pending) -> None:
        self._nbytes += int(pending.nbytes.sum())
        self._noting.append(pending)
        if self._told is None:
            self._tell()

    def _tell(self) -> None:
        """One word at a time: what comes in while a ledger elsewhere is busy goes into the next."""
        noting, self._noting = self._noting, []
        try:
            noted = self._ledger.note(Notes(self._number, [self._note_of(pending) for pending in noting]))
        except HeadraceError as error:
            self._refused(noting, error)
            return
        if isinstance(noted, asyncio.Future):
            self._told = noted
            noted.add_done_callback(lambda done: self._heard(done, noting))
        else:
            self._keep_all(noting, noted)

    def _note_of(self, pending: _Pending) -> Note:
        put = pending.put
        tokens = self._schemas[put.partition].tokens(put)
        return Note(
            put.partition, put.rows, len(pending.nbytes), tuple(put.columns), pending.nbytes, tokens, put.version
        )

    def _heard(self, call: asyncio.Future[list[Noted]], noting: list[_Pending]) -> None:
        self._told = None
        if self._noting:
            self._tell()
        error = RunError("the unit was closed") if call.cancelled() else call.exception()
        if error is not None:
            self._refused(noting, error)
        else:
            self._keep_all(noting, call.result())

    def _refused(self, noting: list[_Pending], error: BaseException) -> None:
        for pending in noting:
            self._nbytes -= int(pending.nbytes.sum())
            _fail(pending.answer, error)

    def _keep_all(self, noting: list[_Pending], noted: list[Noted]) -> None:
        for pending, answer in zip(noting, noted, strict=True):
            self._keep(pending, answer)
        for partition in {pending.put.partition for pending in noting}:
            self._ledger.kept(partition)

    def _keep(self, pending: _Pending, noted: Noted) -> None:
        batch = Batch(rows=noted.rows, columns=pending.put.columns)
        if len(noted.refused):
            kept = np.flatnonzero(noted.refused == 0)
            self._nbytes -= int(pending.nbytes.sum() - pending.nbytes[kept].sum())
            batch = batch.take(kept)
        try:
            self._storage.put(batch)
        except Exception as error:  # of a plugin: whoever put it is told
            _fail(pending.answer, error)
            return
        if not pending.answer.done():
            pending.answer.set_result(noted)

    # ------------------------------------------------------------ consumers

    def read(self, rows: Array, columns: tuple[str, ...]) -> Batch:
        """What the unit keeps. LostRowsError when it does not keep all of it."""
        try:
            return self._storage.get(rows.tolist(), columns)
        except KeyError as error:
            raise LostRowsError(f"a storage unit has not all of the rows it was asked for: {error.args[0]}") from error

    @rpc
    def get(self, fetch: Fetch) -> Any:
        """Read."""
        try:
            return self.read(fetch.rows, fetch.columns)
        except LostRowsError:
            if self._told is None:
                raise
            return asyncio.ensure_future(self._get_later(fetch, self._told))

    async def _get_later(self, fetch: Fetch, told: asyncio.Future[list[Noted]]) -> Batch:
        """The ledger may have offered rows whose acceptance is still on its way here."""
        await asyncio.wait([told])  # by then it was heard, whose callback is the older one, and its values are kept
        return self.read(fetch.rows, fetch.columns)

    @rpc
    def delete(self, rows: Array) -> None:
        """Free; puts that waited for room go on."""
        self._storage.delete(rows.tolist())
        if self._capacity:
            self._nbytes = self._storage.stats().nbytes
            while self._full and self._nbytes + int(self._full[0].nbytes.sum()) <= self._capacity:
                pending = self._full.popleft()
                if not pending.answer.done():
                    self._note(pending)

    @rpc
    def unit_stats(self, request: None) -> StorageStats:
        """Rows and bytes held."""
        return self._storage.stats()

    async def close(self) -> None:
        """Waiting producers are told."""
        for pending in self._full:
            _fail(pending.answer, RunError("the storage unit was closed while a put waited for room"))
        self._storage.close()


def _fail(answer: asyncio.Future[Noted], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
