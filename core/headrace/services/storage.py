"""The storage node: one storage unit behind a socket. Payload goes straight between it and its users."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import msgspec

from headrace.contract import Batch, Storage, StorageStats
from headrace.errors import LostRowsError, WireError
from headrace.registry import PluginSpec, build
from headrace.services.messages import Message, NodeSpec
from headrace.services.node import NodeService
from headrace.wire import Client, rpc

T = TypeVar("T")

STORAGE_DEADLINE = 60.0


class StorageSetup(Message, frozen=True):
    """Which storage a unit uses."""

    storage: PluginSpec


class Columns(Message, frozen=True):
    """A read: these columns of these rows."""

    rows: list[int]
    columns: list[str]


class Rows(Message, frozen=True):
    """Row ids."""

    rows: list[int]


class StorageService(NodeService):
    """Serves put, get, delete and stats."""

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        setup = msgspec.msgpack.decode(spec.setup, type=StorageSetup)
        storage = build(setup.storage)
        assert isinstance(storage, Storage)
        self._storage = storage

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        self._storage.close()

    @rpc
    async def put(self, batch: Batch) -> int:
        """Store; answered after the values are kept. Returns the bytes stored."""
        return self._storage.put(batch)

    @rpc
    async def get(self, request: Columns) -> Batch:
        """Read."""
        try:
            return self._storage.get(request.rows, request.columns)
        except KeyError as error:
            raise LostRowsError(f"a storage unit has not all of the rows it was asked for: {error.args[0]}") from error

    @rpc
    async def delete(self, request: Rows) -> None:
        """Free."""
        self._storage.delete(request.rows)

    @rpc
    async def stats(self, request: None) -> StorageStats:
        """Rows and bytes held."""
        return self._storage.stats()


class StorageClient:
    """A storage unit as the other nodes see it. When the unit is lost and another takes its place, the calls that were
    under way are made again there."""

    def __init__(self, address: str, *, connect: Callable[[str], Client]) -> None:
        self.address = address
        self._connect = connect
        self._client = connect(address)

    async def moved(self, address: str) -> None:
        """The unit of this address has taken the place of a lost one."""
        if address != self.address:
            old, self.address, self._client = self._client, address, self._connect(address)
            await old.close()

    async def put(self, batch: Batch) -> tuple[int, str]:
        """Bytes stored, and the address of the unit that has them."""
        return await self._call("put", batch, reply=int, awaiting="a storage unit to keep rows")

    async def get(self, rows: list[int], columns: list[str]) -> Batch:
        """LostRowsError when the unit does not have them."""
        wanted = Columns(rows=rows, columns=columns)
        batch, _ = await self._call("get", wanted, reply=Batch, awaiting="a storage unit to send rows")
        return batch

    async def delete(self, rows: list[int]) -> None:
        await self._call("delete", Rows(rows=rows), reply=type(None), awaiting="a storage unit to free rows")

    async def stats(self) -> StorageStats:
        stats, _ = await self._call("stats", None, reply=StorageStats, awaiting="a storage unit's stats")
        return stats

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, method: str, request: object, *, reply: type[T], awaiting: str) -> tuple[T, str]:
        while True:
            client, address = self._client, self.address
            try:
                answer = await client.call(method, request, reply=reply, deadline=STORAGE_DEADLINE, awaiting=awaiting)
                return answer, address
            except WireError:
                if client is self._client:
                    raise
