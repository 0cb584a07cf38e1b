"""The data plane from a node's event loop: put rows that a run has dispatched, read rows of which one is told where.

A unit that is lost is known to be when somebody says so (:meth:`AsyncPlane.lost`): what was under way there ends, puts
go to another unit or wait for one, and reads end with LostRowsError. So is one that comes later
(:meth:`AsyncPlane.joined`).
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress

from headrace.contract import Array, Batch, Column, Ragged, Repeated
from headrace.dataplane.gathering import join, parts
from headrace.dataplane.messages import Fetch, Found, Noted, Put
from headrace.dataplane.shared import Segments
from headrace.dataplane.unit_clients import unit_gone
from headrace.errors import WireError
from headrace.wire import Client

DEADLINE = 60.0
ROOM_DEADLINE = 7 * 24 * 3600.0
"""How long a put waits for room: for as long as training takes, unless somebody says that the unit is lost."""
UNIT_DEADLINE = 600.0
"""How long a put waits for a storage unit to be there."""


class AsyncPlane:
    """``connect``: a client of an address. ``name``: by which the ledger knows who puts."""

    def __init__(self, ledger: str, *, name: str, connect: Callable[[str], Client]) -> None:
        self._name = name
        self._connect = connect
        self._ledger = connect(ledger)
        self._addresses: list[str] = []
        """By number; "" of units that are gone."""
        self._clients: dict[str, Client] = {}
        self._segments: dict[int, Segments | None] = {}
        """By the unit's number."""
        self._turns = itertools.count()

    async def put(
        self,
        partition: str,
        columns: Mapping[str, Column],
        *,
        rows: Array,
        tags: Mapping[str, Array] | None = None,
        fresh: bool = False,
    ) -> Noted:
        """Store columns of ``rows``; answered when they are kept and the ledger knows, with what was not wanted.
        ``fresh``: the first columns of rows, which wait while the unit is full."""
        values: dict[str, Array | Ragged | Repeated] = dict(columns)
        put = Put(partition, rows, values, 0, None if tags is None else dict(tags), self._name, fresh)
        deadline = ROOM_DEADLINE if fresh else DEADLINE
        while True:
            address = await self._next_unit()
            client = self._client(address)
            try:
                return await client.call(
                    "put", put, reply=Noted, deadline=deadline, awaiting="a storage unit to keep rows"
                )
            except WireError:
                if self._clients.get(address) is client:
                    raise

    async def get(
        self, partition: str, rows: Array, units: Array, columns: Sequence[str], *, held: bool = False
    ) -> Batch:
        """Values of ``rows``, in this order. ``units``: int16 [rows, columns], which unit has each. ``held``: the rows
        cannot leave the data plane before the caller is done with the values, which may then be read-only views of
        memory that a unit shares; else they are its own. LostRowsError when a unit has lost them."""
        asked = list(parts(units, columns))
        fetched = (self._fetch(part.unit, Fetch(rows[part.at], part.columns, partition), held) for part in asked)
        found = await asyncio.gather(*fetched)
        return join(rows, columns, list(zip(asked, found, strict=True)))

    async def lost(self, address: str) -> None:
        """Nobody answers at this address any more."""
        for unit in [number for number, known in enumerate(self._addresses, 1) if known == address]:
            self._forget_segments(unit)
        self._addresses = ["" if known == address else known for known in self._addresses]
        client = self._clients.pop(address, None)
        if client is not None:
            await client.close()

    def joined(self) -> None:
        """There is another unit: the next put asks where they are, so that it gets its share."""
        self._addresses = []

    async def close(self) -> None:
        for unit in list(self._segments):
            self._forget_segments(unit)
        for client in [self._ledger, *self._clients.values()]:
            await client.close()

    async def _fetch(self, unit: int, fetch: Fetch, held: bool) -> Batch:
        address = await self._address(unit, fetch.rows)
        client = self._client(address)
        awaiting = "a storage unit to send rows"
        try:
            segments = await self._reach_segments(unit, client) if held else None
            if segments is not None:
                found = await client.call("locate", fetch, reply=Found, deadline=DEADLINE, awaiting=awaiting)
                with suppress(OSError):  # this process cannot map what it should
                    return segments.batch(fetch, found)
            return await client.call("get", fetch, reply=Batch, deadline=DEADLINE, awaiting=awaiting)
        except WireError as error:
            if self._clients.get(address) is client:
                raise
            raise unit_gone(unit, fetch.rows) from error

    async def _reach_segments(self, unit: int, client: Client) -> Segments | None:
        """The memory that a unit shares; None where it shares none, or this process cannot map it."""
        if unit not in self._segments:
            directory = await client.call(
                "segments", reply=str, deadline=DEADLINE, awaiting="a storage unit to say what it shares"
            )
            if unit not in self._segments:  # others asked meanwhile
                self._segments[unit] = Segments.reach(directory)
        return self._segments[unit]

    def _forget_segments(self, unit: int) -> None:
        if (segments := self._segments.pop(unit, None)) is not None:
            segments.close()

    async def _address(self, unit: int, rows: Array) -> str:
        """Of a unit by its number. LostRowsError when it is gone, and with it ``rows``."""
        if unit > len(self._addresses):
            await self._learn()
        address = self._addresses[unit - 1] if 0 < unit <= len(self._addresses) else ""
        if not address:
            raise unit_gone(unit, rows)
        return address

    async def _next_unit(self) -> str:
        """Units in turn."""
        if not any(self._addresses):
            await self._learn()
        there = [address for address in self._addresses if address]
        return there[next(self._turns) % len(there)]

    async def _learn(self) -> None:
        self._addresses = await self._ledger.call(
            "units", reply=list[str], deadline=UNIT_DEADLINE, awaiting="a storage unit to be there"
        )

    def _client(self, address: str) -> Client:
        if address not in self._clients:
            self._clients[address] = self._connect(address)
        return self._clients[address]
