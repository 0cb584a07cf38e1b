"""The storage node: one storage unit of the data plane behind a socket."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from headrace.contract import Storage
from headrace.dataplane import RemoteLedger
from headrace.dataplane.shared_unit import unit_service
from headrace.dataplane.unit import KEPT_FREE_BYTES
from headrace.freed_memory import keep_freed_memory
from headrace.registry import PluginSpec, build
from headrace.services.messages import Message
from headrace.services.node import NodeService
from headrace.services.node_messages import NodeSpec


class StorageSetup(Message, frozen=True):
    """Which storage a unit uses. ``capacity``: bytes, above which new rows wait; 0 for no bound."""

    storage: PluginSpec
    capacity: int = 0


class StorageService(NodeService):
    """A unit that has joined the ledger at the controller."""

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        keep_freed_memory(KEPT_FREE_BYTES)
        setup = msgspec.msgpack.decode(spec.setup, type=StorageSetup)
        storage = build(setup.storage)
        assert isinstance(storage, Storage)
        self._controller = self.network.client(spec.controller)
        self._unit = unit_service(storage, ledger=RemoteLedger(self._controller), capacity=setup.capacity)

    @property
    def served(self) -> tuple[object, ...]:
        return self, self._unit

    async def start(self) -> None:
        pass

    def serving(self, refused: Mapping[str, int]) -> None:
        self._unit.refused = refused

    async def reached(self, address: str) -> None:
        await self._unit.join(address)
        self.supervise(self._unit.stay(address), "stay in the data plane")

    async def close(self) -> None:
        await self._unit.close()
        await self._controller.close()
