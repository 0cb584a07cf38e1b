"""Methods that are no coroutines."""

from __future__ import annotations

import asyncio
import gc
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import zmq

from headrace.contract import Array
from headrace.errors import DeadlineError, EngineError, RunError, WireError
from headrace.wire import Client, Promise, Server, encode, ipc_address, rpc
from headrace.wire.messages import Call, Failure, Reply


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
    def soonest(self, request: None) -> Any:
        self.awaited: Promise[str] = Promise()
        return self.awaited

    @rpc
    def keep(self, request: Array) -> Any:
        self.asked = weakref.ref(request)
        return self.soonest(None)

    @rpc
    def bring(self, request: str) -> str:
        self.awaited.set_result(request)
        return "brought"

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


async def test_a_promise_knows_whether_its_caller_is_there_still(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, client):
        killed = Client(ipc_address(str(tmp_path), "service"))
        call = killed.submit("soonest", reply=str, deadline=30)
        while not hasattr(service, "awaited"):
            await client.call("triple", 7, reply=int, deadline=5)
        assert service.awaited.is_awaited()
        assert await client.call("triple", 7, reply=int, deadline=5) == 21
        assert not call.done(), "to be looked for is no answer"
        await killed.close()
        with pytest.raises(WireError):
            await call
        while service.awaited.is_awaited():  # until the server has heard of it
            assert await client.call("triple", 7, reply=int, deadline=5) == 21


def message(number: int, method: str, request: object, seconds: float) -> bytes:
    return bytes(encode(Call(number, method, seconds, request))[0])


async def test_what_was_promised_leaves_before_the_answer_to_the_call_that_kept_the_promise(tmp_path: Path) -> None:
    async with serving(tmp_path):
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(ipc_address(str(tmp_path), "service"))
            peer.send(message(1, "soonest", None, 5.0))
            peer.send(message(2, "bring", "rows", 5.0))
            replies = []
            for _ in range(2):
                assert await asyncio.to_thread(peer.poll, 5000)
                replies.append(msgspec.msgpack.decode(peer.recv(), type=Reply | Failure))
            assert replies == [Reply(1, "rows"), Reply(2, "brought")]


async def test_a_caller_whose_deadline_ends_a_promise_is_told_nothing_else(tmp_path: Path) -> None:
    """It hears its own deadline, though the server's clock may be the faster one."""

    async with serving(tmp_path) as (service, _):
        with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
            peer.linger = 0
            peer.connect(ipc_address(str(tmp_path), "service"))
            peer.send(message(1, "later", None, 0.001))
            await service.cancelled.wait()
            peer.send(message(2, "triple", 7, 5.0))
            assert await asyncio.to_thread(peer.poll, 5000)
            assert msgspec.msgpack.decode(peer.recv(), type=Reply | Failure) == Reply(2, 21)


@pytest.mark.parametrize("end", ["answered", "given up", "too late"])
async def test_what_was_asked_is_let_go_when_its_promise_ends(tmp_path: Path, end: str) -> None:
    """At once: a storage unit would keep the values of many puts until Python looks for cycles."""
    gc.disable()
    try:
        async with serving(tmp_path) as (service, client):
            deadline = 0.05 if end == "too late" else 30
            asking = asyncio.create_task(
                client.call("keep", np.ones(1 << 20), reply=str, deadline=deadline, awaiting="it")
            )
            while not hasattr(service, "asked"):
                await client.call("triple", 2, reply=int, deadline=30, awaiting="a turn")
            if end == "answered":
                await client.call("bring", "it", reply=str, deadline=30, awaiting="it")
                assert await asking == "it"
            elif end == "given up":
                asking.cancel()
            await asyncio.wait([asking])
            assert end != "too late" or isinstance(asking.exception(), DeadlineError)
            while not service.awaited.done():
                await client.call("triple", 2, reply=int, deadline=30, awaiting="a turn")
            await client.call("triple", 2, reply=int, deadline=30, awaiting="a turn")
            assert service.asked() is None
    finally:
        gc.enable()
