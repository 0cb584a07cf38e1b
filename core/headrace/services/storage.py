"""The storage node: one storage unit behind a socket. Payload goes straight between it and its users."""

from __future__ import annotations

import msgspec

from headrace.contract import Batch, Storage, StorageStats
from headrace.registry import PluginSpec, build
from headrace.services.messages import Message, NodeSpec
from headrace.services.node import NodeService
from headrace.wire import Client, rpc

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
        return self._storage.get(request.rows, request.columns)

    @rpc
    async def delete(self, request: Rows) -> None:
        """Free."""
        self._storage.delete(request.rows)

    @rpc
    async def stats(self, request: None) -> StorageStats:
        """Rows and bytes held."""
        return self._storage.stats()


class StorageClient:
    """A storage unit as the other nodes see it."""

    def __init__(self, client: Client) -> None:
        self._client = client

    async def put(self, batch: Batch) -> int:
        return await self._client.call(
            "put", batch, reply=int, deadline=STORAGE_DEADLINE, awaiting="a storage unit to keep rows"
        )

    async def get(self, rows: list[int], columns: list[str]) -> Batch:
        return await self._client.call(
            "get",
            Columns(rows=rows, columns=columns),
            reply=Batch,
            deadline=STORAGE_DEADLINE,
            awaiting="a storage unit to send rows",
        )

    async def delete(self, rows: list[int]) -> None:
        await self._client.call(
            "delete", Rows(rows=rows), deadline=STORAGE_DEADLINE, awaiting="a storage unit to free rows"
        )

    async def stats(self) -> StorageStats:
        return await self._client.call(
            "stats", reply=StorageStats, deadline=STORAGE_DEADLINE, awaiting="a storage unit's stats"
        )

    async def close(self) -> None:
        await self._client.close()
