"""A data plane of its own processes: the ledger in one, with or without a unit, and each further unit in another.

    directory = tempfile.mkdtemp()      # for the own user alone
    until_stopped(serve_ledger(ipc_address(directory, "ledger"), MemoryStorage(None)))

and in each further process

    ledger = ipc_address(directory, "ledger")
    until_stopped(serve_unit(ipc_address(directory, "unit-1"), MemoryStorage(None), ledger=ledger))

with ``ipc_address`` of :mod:`headrace.wire` and the storages of ``headrace_storage``. Across hosts addresses are
``tcp://HOST:PORT``, everybody has the same ``keys``, and clients are made by ``connect``:
``DataPlane(address, connect=lambda address: BlockingClient(address, keys=keys))``.
"""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from typing import Any

from headrace.contract import Storage
from headrace.dataplane.ledger import LedgerService
from headrace.dataplane.links import RemoteLedger
from headrace.dataplane.metrics import data_plane_metrics
from headrace.dataplane.shards import ShardedLedger
from headrace.dataplane.shared_unit import unit_service
from headrace.dataplane.unit import KEPT_FREE_BYTES
from headrace.errors import ContractError, HeadraceError
from headrace.freed_memory import keep_freed_memory
from headrace.observe.exposition import MetricsPage
from headrace.wire import Client, Keys, Server


def until_stopped(serving: Coroutine[Any, Any, None]) -> None:
    """Serve in this process until Ctrl-C or SIGTERM; shared memory and files are cleaned up then. What cannot be
    served, or not any more, is told on stderr in words, and the process ends with status 1: SystemExit."""

    async def run() -> None:
        task = asyncio.ensure_future(serving)
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, task.cancel)
        with suppress(asyncio.CancelledError):
            await task

    try:
        asyncio.run(run())
    except HeadraceError as error:  # for whoever started the process, who needs no traceback
        raise SystemExit(f"{type(error).__name__}: {error}") from error


def _announce(address: str) -> None:
    print(address, flush=True)  # whoever started this process may wait for it, at a pipe


async def serve_ledger(
    address: str,
    storage: Storage | None = None,
    *,
    capacity: int = 0,
    shard: int = 0,
    shards: int = 1,
    keys: Keys | None = None,
    metrics: str = "",
    ready: Callable[[str], None] = _announce,
) -> None:
    """Serve until cancelled. ``shard``: which of ``shards`` it is; ``metrics``: where Prometheus finds those of ledger
    and units, ``HOST:PORT`` or ``unix:PATH``. With a ``storage`` the process is a storage unit too: what is kept there
    costs one word to put and one to lease with its values. ``ready`` is told where."""
    if not 0 <= shard < shards:
        raise ContractError(f"shard {shard} of {shards} of a ledger", fix="count shards from 0 on: 0 <= shard < shards")
    _check_capacity(capacity)
    if storage is not None:
        _check_storage(storage)
    if storage is not None and shards > 1:
        raise ContractError("a shard of a ledger is no storage unit", fix="start the storage in a process of its own")
    keep_freed_memory(KEPT_FREE_BYTES)
    ledger = LedgerService(connect=lambda unit: Client(unit, keys=keys), shard=shard, shards=shards)
    unit = None if storage is None else unit_service(storage, ledger=ledger, capacity=capacity)
    server = Server(*(service for service in (ledger, unit) if service is not None), address=address, keys=keys)
    page = MetricsPage(metrics, lambda: data_plane_metrics(ledger, server)) if metrics else None
    try:
        reached = await server.start()
        if unit is not None:
            ledger.add_own(unit, reached)
        if page is not None:
            await page.start()
        ready(reached)
        await asyncio.Event().wait()
    finally:
        if page is not None:
            await page.close()
        await server.close()
        if unit is not None:
            await unit.close()
        await ledger.close()


async def serve_unit(
    address: str,
    storage: Storage,
    *,
    ledger: str | Sequence[str],
    capacity: int = 0,
    keys: Keys | None = None,
    ready: Callable[[str], None] = _announce,
) -> None:
    """Serve until cancelled; join the ledger, or all its shards in their order, first. RunError when one of them has
    given the unit up."""
    _check_capacity(capacity)
    _check_storage(storage)
    addresses = [ledger] if isinstance(ledger, str) else list(ledger)
    if not addresses:
        raise ContractError(
            "a storage unit without a ledger", fix="name the address where one is served, or of all shards"
        )
    keep_freed_memory(KEPT_FREE_BYTES)
    clients = [Client(address, keys=keys) for address in addresses]
    links = [RemoteLedger(client) for client in clients]
    unit = unit_service(storage, ledger=ShardedLedger(links) if len(links) > 1 else links[0], capacity=capacity)
    server = Server(unit, address=address, keys=keys)
    unit.refused = server.refused
    try:
        reached = await server.start()
        await unit.join(reached)
        ready(reached)
        await unit.stay(reached)
    finally:
        await server.close()
        await unit.close()
        for client in clients:
            await client.close()


def _check_capacity(capacity: int) -> None:
    """As somebody may give it whom no type checker told."""
    if not isinstance(capacity, int) or isinstance(capacity, bool) or capacity < 0:
        raise ContractError(f"a capacity of {capacity!r}", fix="give a whole number of bytes, 0 for no bound: 8 << 30")


def _check_storage(storage: Storage) -> None:
    """What it could not work with is said before anything is served."""
    if not isinstance(storage, Storage):
        raise ContractError(f"{storage!r} in the place of a storage", fix="pass one on: MemoryStorage(None)")
    storage.preflight(storage.settings, directory=os.getcwd(), origin=lambda key: f"{type(storage).__name__}, {key}")
