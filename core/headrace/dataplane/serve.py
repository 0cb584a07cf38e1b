"""A data plane of its own processes: the ledger in one, each storage unit in another."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.contract import Storage
from headrace.dataplane.ledger import LedgerService
from headrace.dataplane.unit import UnitService
from headrace.wire import Client, Keys, Server


async def serve_ledger(address: str, *, keys: Keys | None = None, ready: Callable[[str], None] = print) -> None:
    """Serve until cancelled. ``ready`` is told where."""
    ledger = LedgerService(connect=lambda unit: Client(unit, keys=keys))
    server = Server(ledger, address=address, keys=keys)
    try:
        ready(await server.start())
        await asyncio.Event().wait()
    finally:
        await server.close()
        await ledger.close()


async def serve_unit(
    address: str,
    storage: Storage,
    *,
    ledger: str,
    capacity: int = 0,
    keys: Keys | None = None,
    ready: Callable[[str], None] = print,
) -> None:
    """Serve until cancelled; join the ledger at ``ledger`` first. RunError when the ledger has given the unit up."""
    client = Client(ledger, keys=keys)
    unit = UnitService(storage, ledger=client, capacity=capacity)
    server = Server(unit, address=address, keys=keys)
    try:
        reached = await server.start()
        await unit.join(reached)
        ready(reached)
        await unit.stay(reached)
    finally:
        await server.close()
        await unit.close()
        await client.close()
