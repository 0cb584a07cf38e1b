"""Methods that are no coroutines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from headrace.errors import EngineError, RunError
from headrace.wire import Client, Server, ipc_address, rpc


class Service:
    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()

    @rpc
    def triple(self, request: int) -> int:
        if request < 0:
            raise EngineError("what happened", fix="do that")
        return 3 * request // (request != 1)

    @rpc
    def later(self, request: None) -> Any:
        self.promised: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self.promised.add_done_callback(lambda done: self.cancelled.set() if done.cancelled() else None)
        self.started.set()
        return self.promised


@asynccontextmanager
async def serving(directory: Path) -> AsyncIterator[tuple[Service, Client]]:
    service = Service()
    server = Server(service, address=ipc_address(str(directory), "service"))
    client = Client(await server.start())
    try:
        yield service, client
    finally:
        await client.close()
        await server.close()


async def test_a_plain_method_is_answered_at_once_and_fails_as_others_do(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, client):
        assert await client.call("triple", 7, reply=int, deadline=5) == 21
        with pytest.raises(EngineError, match="what happened"):
            await client.call("triple", -1, reply=int, deadline=5)
        with pytest.raises(RunError, match="triple raised ZeroDivisionError"):
            await client.call("triple", 1, reply=int, deadline=5)


async def test_a_plain_method_may_promise_its_answer(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, client):
        call = client.submit("later", reply=str, deadline=5)
        await service.started.wait()
        assert not call.done()
        service.promised.set_result("kept")
        assert await call == "kept"


async def test_a_promise_that_nobody_waits_for_any_more_is_cancelled(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, client):
        call = client.submit("later", reply=str, deadline=5)
        await service.started.wait()
        call.cancel()
        await service.cancelled.wait()
