"""A storage unit whose values lie in shared memory: those of large puts are neither received nor sent.

Invariant: a region that was opened is adopted when the ledger has taken its rows, and abandoned in every other case.
"""

from __future__ import annotations

import os
from typing import Any

from headrace.contract import Array, Column, Placed, Region, SharedMemory, Storage
from headrace.dataplane.links import LedgerLink
from headrace.dataplane.messages import Fetch, Found, Put, PutPlaced, Reserve, Reserved
from headrace.dataplane.pending import Pending
from headrace.dataplane.refusals import lost_rows
from headrace.dataplane.shared import SHARED_BYTES
from headrace.dataplane.traffic import MAPPED, SENT
from headrace.dataplane.unit import UnitService, stored_names
from headrace.wire import rpc


class SharedUnitService(UnitService):
    """``storage`` is SharedMemory too."""

    def __init__(self, storage: Storage, *, ledger: LedgerLink, capacity: int = 0) -> None:
        super().__init__(storage, ledger=ledger, capacity=capacity)
        assert isinstance(storage, SharedMemory)
        self._shared: SharedMemory = storage

    @rpc
    def segments(self, request: None) -> str:
        return self._shared.directory

    @rpc
    def reserve(self, request: Reserve) -> Reserved:
        """Bytes for a producer to write to; none for one that maps the memory of a unit which was here before."""
        if not os.path.exists(os.path.join(self._shared.directory, os.path.basename(request.owner))):
            return Reserved(None)
        return Reserved(self._shared.reserve(request.nbytes, owner=request.owner))

    @rpc
    def put_placed(self, put: PutPlaced) -> Any:
        """:meth:`put` of values that lie in a reserved region."""
        names = stored_names(put.partition, tuple(put.columns))
        opened = self._shared.open(put.region, dict(zip(names, put.columns.values(), strict=True)))
        columns = {column: opened[name] for column, name in zip(put.columns, names, strict=True)}
        kept = Put(put.partition, put.rows, dict(columns), put.version, made=put.made, once=put.once, wait=put.wait)
        return self._take(kept, put.region)

    @rpc
    def locate(self, fetch: Fetch) -> Any:
        """:meth:`get` that sends only what is small, and says where the rest lies."""
        return self._when_kept(fetch, self._located)

    def _located(self, fetch: Fetch) -> Found:
        found = self._found(fetch)
        self._traffic.add(SENT, fetch.partition, found.sent)
        self._traffic.add(MAPPED, fetch.partition, found.placed)
        return found

    def _found(self, fetch: Fetch) -> Found:
        names = stored_names(fetch.partition, fetch.columns)
        places: dict[str, Array] = {}
        try:
            placed = self._locate(fetch.rows.tolist(), dict(zip(names, fetch.columns, strict=True)), places)
        except KeyError as error:
            raise lost_rows(fetch) from error
        small = tuple(name for name, where in placed.items() if where.nbytes < SHARED_BYTES and name not in places)
        sent = self.read(Fetch(fetch.rows, small, fetch.partition)).columns
        return Found(dict(sent), {name: where for name, where in placed.items() if name not in sent}, places)

    def _locate(self, rows: list[int], columns: dict[str, str], places: dict[str, Array]) -> dict[str, Placed]:
        """Where the values of columns lie, of stored name → name. ``places`` is told which of them each row has, for
        columns whose values rows share."""
        own = [name for name in columns if not self._contents.is_repeated(name)]
        placed = {columns[name]: where for name, where in self._shared.locate(rows, own).items()}
        for name in columns.keys() - set(own):
            ids, places[columns[name]] = self._contents.find(rows, name)
            placed[columns[name]] = self._shared.locate(ids, [name])[name]
        return placed

    def leased(self, fetch: Fetch) -> dict[str, Column] | None:
        found = self._found(fetch)
        if found.placed:
            return None
        self._traffic.add(SENT, fetch.partition, found.sent)
        return found.sent

    def _store(self, pending: Pending, rows: Array, kept: Array | None) -> None:
        if pending.region is not None and kept is None:
            self._shared.adopt(pending.region, rows)
            return
        super()._store(pending, rows, kept)
        self._discard(pending.region)

    def _discard(self, region: Region | None) -> None:
        if region is not None:
            self._shared.abandon(region)


def unit_service(storage: Storage, *, ledger: LedgerLink, capacity: int = 0) -> UnitService:
    """What serves a storage."""
    kind = SharedUnitService if isinstance(storage, SharedMemory) else UnitService
    return kind(storage, ledger=ledger, capacity=capacity)
