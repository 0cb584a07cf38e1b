"""A data plane in this process: its services on a loop in a thread, so that tests are plain code that may block."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from headrace.contract import Storage
from headrace.dataplane import DataPlane
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.wire import ipc_address
from headrace_storage.memory import MemoryStorage


class Services:
    """Runs the ledger, which is a unit too with ``own``, and as many units as are asked for."""

    def __init__(
        self, directory: Path, *, own: Storage | None = None, capacity: int = 0, shards: int = 1, metrics: str = ""
    ) -> None:
        self._directory = str(directory)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever)
        self._thread.start()
        self._serving: list[asyncio.Task[None]] = []
        self._planes: list[DataPlane] = []
        self._ledgers = [ipc_address(self._directory, f"ledger-{shard}") for shard in range(shards)]
        self.ledger = self._ledgers[0]
        for shard, address in enumerate(self._ledgers):
            self._serve_ledger(address, own, capacity=capacity, metrics=metrics, shard=shard, shards=shards)

    def _serve_ledger(self, address: str, own: Storage | None, **how: Any) -> None:
        self._serve(lambda ready: serve_ledger(address, own, ready=ready, **how))

    def unit(self, *, capacity: int = 0, storage: Storage | None = None, at: int = 0) -> None:
        """Another storage unit, where the one that joined as ``at`` was; it has joined when this returns."""
        kept = MemoryStorage(None) if storage is None else storage
        address = ipc_address(self._directory, f"unit-{at or len(self._serving)}")
        self._serve(lambda ready: serve_unit(address, kept, ledger=self._ledgers, capacity=capacity, ready=ready))

    def lose_unit(self, number: int) -> None:
        """The unit that joined as this one ends without a word."""

        async def end() -> None:
            self._serving[number].cancel()
            await asyncio.gather(self._serving[number], return_exceptions=True)

        asyncio.run_coroutine_threadsafe(end(), self._loop).result(30)

    def lose_ledger(self) -> None:
        """The first shard ends without a word."""
        self.lose_unit(0)

    def plane(self) -> DataPlane:
        """A client for one thread."""
        self._planes.append(DataPlane(self._ledgers))
        return self._planes[-1]

    def close(self) -> None:
        for plane in self._planes:
            plane.close()
        asyncio.run_coroutine_threadsafe(self._stop(), self._loop).result(30)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def _serve(self, serve: Callable[[Callable[[str], None]], Coroutine[Any, Any, None]]) -> None:
        reached = threading.Event()

        async def begin() -> None:
            self._serving.append(asyncio.create_task(serve(lambda _: reached.set())))

        asyncio.run_coroutine_threadsafe(begin(), self._loop).result(30)
        assert reached.wait(30)

    async def _stop(self) -> None:
        for task in reversed(self._serving):
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def soon(condition: Callable[[], bool]) -> None:
    """Until the condition holds, which a call to another thread tells; fails after 30 s."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.001)  # whoever makes it true needs the interpreter, which a thread that only looks hardly gives up
