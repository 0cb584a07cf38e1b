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
from headrace.dataplane.messages import Described, Fetch, Note, Noted, Notes, Put
from headrace.dataplane.schema import Schema
from headrace.errors import LostRowsError, RunError
from headrace.wire import Client, rpc

LEDGER_DEADLINE = 60.0
BEAT_SECONDS = 1.0


class _Pending(NamedTuple):
    put: Put
    nbytes: Array
    answer: asyncio.Future[Noted]


class UnitService:
    """``capacity``: bytes, above which new rows wait; 0 for no bound."""

    def __init__(self, storage: Storage, *, ledger: Client, capacity: int = 0) -> None:
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
        self._number = await self._ledger.call(
            "join", address, reply=int, deadline=LEDGER_DEADLINE, awaiting="the ledger to take a storage unit"
        )

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
            return asyncio.ensure_future(self._learn(put))
        nbytes = schema.check(put)
        pending = _Pending(put, nbytes, asyncio.get_running_loop().create_future())
        if not len(put.rows) and not self._has_room(int(nbytes.sum())):
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

    async def _learn(self, put: Put) -> Noted:
        """The first of a partition: ask for its schema."""
        described = await self._ledger.call(
            "describe",
            put.partition,
            reply=Described,
            deadline=LEDGER_DEADLINE,
            awaiting="the schema of a partition",
        )
        self._schemas[put.partition] = Schema(described.spec)
        answer: Noted = await self.put(put)
        return answer

    def _note(self, pending: _Pending) -> None:
        self._nbytes += int(pending.nbytes.sum())
        self._noting.append(pending)
        if self._told is None:
            self._tell()

    def _tell(self) -> None:
        """One word at a time: what comes in while the ledger is busy goes into the next."""
        noting, self._noting = self._noting, []
        notes = Notes(self._number, [self._note_of(pending) for pending in noting])
        self._told = self._ledger.submit(
            "note", notes, reply=list[Noted], deadline=LEDGER_DEADLINE, awaiting="the ledger to take rows"
        )
        self._told.add_done_callback(lambda done: self._heard(done, noting))

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
            for pending in noting:
                self._nbytes -= int(pending.nbytes.sum())
                _fail(pending.answer, error)
            return
        for pending, noted in zip(noting, call.result(), strict=True):
            self._keep(pending, noted)

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

    @rpc
    def get(self, fetch: Fetch) -> Any:
        """Read."""
        try:
            return self._storage.get(fetch.rows.tolist(), fetch.columns)
        except KeyError as error:
            if self._told is not None:
                return asyncio.ensure_future(self._get_later(fetch, self._told))
            raise _lost(error) from error

    async def _get_later(self, fetch: Fetch, told: asyncio.Future[list[Noted]]) -> Batch:
        """The ledger may have offered rows whose acceptance is still on its way here."""
        await asyncio.wait([told])  # by then it was heard, whose callback is the older one, and its values are kept
        try:
            return self._storage.get(fetch.rows.tolist(), fetch.columns)
        except KeyError as error:
            raise _lost(error) from error

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
    def stats(self, request: None) -> StorageStats:
        """Rows and bytes held."""
        return self._storage.stats()

    async def close(self) -> None:
        """Waiting producers are told."""
        for pending in self._full:
            _fail(pending.answer, RunError("the storage unit was closed while a put waited for room"))
        self._storage.close()


def _lost(error: KeyError) -> LostRowsError:
    return LostRowsError(f"a storage unit has not all of the rows it was asked for: {error.args[0]}")


def _fail(answer: asyncio.Future[Noted], error: BaseException) -> None:
    if not answer.done():
        answer.set_exception(error)
