from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace import errors
from headrace.contract import Array, Batch, Ragged
from headrace.errors import (
    ContractError,
    DeadlineError,
    EngineError,
    HeadraceError,
    RunError,
    StalenessError,
    WireError,
)
from headrace.wire import Client, Limits, Server, ipc_address, rpc


class Unlucky(EngineError):
    """A plugin's own error."""


class Fill(msgspec.Struct):
    batch: Batch
    value: float


class Pair(msgspec.Struct, array_like=True):
    first: int
    second: int


class Service:
    def __init__(self) -> None:
        self.started = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.gate = asyncio.Event()
        self.server: Server | None = None

    @rpc
    async def double(self, request: int) -> int:
        return 2 * request

    @rpc
    async def fill(self, request: Fill) -> Batch:
        ragged = request.batch.ragged("tokens")
        return request.batch.with_columns({"filled": ragged.like(np.full(len(ragged.values), request.value))})

    @rpc
    async def pair(self, request: Pair) -> int:
        return request.first

    @rpc
    async def nothing(self, request: None) -> None:
        return request

    @rpc
    async def fail(self, request: str) -> None:
        kind = Unlucky if request == "Unlucky" else getattr(errors, request)
        raise kind("what happened", origin="run.toml:3", fix="do that")

    @rpc
    async def crash(self, request: None) -> None:
        raise ZeroDivisionError("by zero")

    @rpc
    async def cancel_itself(self, request: None) -> None:
        raise asyncio.CancelledError

    @rpc
    async def unencodable(self, request: None) -> Any:
        return object()

    @rpc
    async def wait(self, request: None) -> None:
        self.started.set()
        try:
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    @rpc
    async def open(self, request: None) -> None:
        self.gate.set()

    @rpc
    async def zeros(self, request: int) -> Array:
        return np.zeros(request, np.uint8)

    @rpc
    async def stop(self, request: None) -> str:
        assert self.server is not None
        await self.server.close()
        return "stopped"

    async def private(self, request: None) -> None:
        raise AssertionError("not an rpc method")


@asynccontextmanager
async def serving(directory: Path, **options: Any) -> AsyncIterator[tuple[Service, Server, Client]]:
    service = Service()
    server = Server(service, address=ipc_address(str(directory), "service"), **options)
    service.server = server
    client = Client(await server.start())
    try:
        yield service, server, client
    finally:
        await client.close()
        await server.close()


async def soon(condition: Callable[[], bool]) -> None:
    """Until the condition holds; fails after 30 s."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"
        await asyncio.sleep(0.001)  # between looks at what another process does


async def test_a_call_gives_what_the_method_returns(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client):
        assert await client.call("double", 21, reply=int, deadline=5) == 42
        await client.call("nothing", deadline=5)
        assert await client.call("nothing", reply=object, deadline=5) is None
        batch = Batch(rows=np.arange(2), columns={"tokens": Ragged.from_arrays([np.arange(3000), np.arange(2)])})
        filled = await client.call("fill", Fill(batch, 0.5), reply=Batch, deadline=5)
        assert filled.ragged("filled").lengths.tolist() == [3000, 2]
        assert set(filled.ragged("filled").values.tolist()) == {0.5}


async def test_calls_run_side_by_side_and_answers_find_their_caller(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _, client):
        waiting = asyncio.create_task(client.call("wait", deadline=5))
        await service.started.wait()
        answers = await asyncio.gather(*(client.call("double", i, reply=int, deadline=5) for i in range(500)))
        assert answers == [2 * i for i in range(500)]
        await client.call("open", deadline=5)
        await waiting


async def test_many_clients_share_a_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server, _):
        clients = [Client(ipc_address(str(tmp_path), "service")) for _ in range(10)]
        answers = await asyncio.gather(*(c.call("double", i, reply=int, deadline=5) for i, c in enumerate(clients)))
        assert answers == [2 * i for i in range(10)]
        for client in clients:
            await client.close()
        assert not server.refused


@pytest.mark.parametrize(
    "name", [n for n, kind in vars(errors).items() if isinstance(kind, type) and issubclass(kind, HeadraceError)]
)
async def test_a_headrace_error_arrives_as_the_same_class_with_all_its_parts(tmp_path: Path, name: str) -> None:
    async with serving(tmp_path) as (_, _, client):
        with pytest.raises(HeadraceError) as raised:
            await client.call("fail", name, deadline=5)
    assert type(raised.value) is getattr(errors, name)
    assert (raised.value.message, raised.value.origin, raised.value.fix) == ("what happened", "run.toml:3", "do that")


async def test_an_error_class_of_a_plugin_arrives_as_its_nearest_known_base(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client):
        with pytest.raises(EngineError, match="what happened"):
            await client.call("fail", "Unlucky", deadline=5)


async def test_who_hears_of_any_other_exception_is_told_which_file_has_its_traceback(tmp_path: Path) -> None:
    async with serving(tmp_path, log="run/logs/trainer.log") as (_, _, client):
        with pytest.raises(RunError, match="crash raised ZeroDivisionError") as raised:
            await client.call("crash", deadline=5)
    assert (raised.value.origin, raised.value.fix) == ("run/logs/trainer.log", "read the traceback in this log")


async def test_any_other_exception_arrives_as_run_error_and_is_logged_with_its_traceback(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serving(tmp_path) as (_, _, client):
        with (
            caplog.at_level(logging.ERROR),
            pytest.raises(RunError, match="crash raised ZeroDivisionError: by zero") as raised,
        ):
            await client.call("crash", deadline=5)
        assert raised.value.fix == "the node's log has the traceback"
        assert caplog.records[0].exc_info is not None
        with pytest.raises(RunError, match="unencodable raised TypeError"):
            await client.call("unencodable", deadline=5)
        with pytest.raises(RunError, match="cancel_itself was cancelled"):
            await client.call("cancel_itself", deadline=5)
        assert await client.call("double", 1, reply=int, deadline=5) == 2


async def test_a_deadline_names_method_address_seconds_and_what_was_awaited(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client):
        with pytest.raises(DeadlineError) as raised:
            await client.call("wait", deadline=0.05, awaiting="the last instance of version 3")
    message = raised.value.message
    assert message == (
        f"no reply to wait from ipc://{tmp_path}/service.sock in 0.05 s, awaiting the last instance of version 3"
    )


async def test_a_call_waits_for_a_server_that_starts_late_and_survives_its_restart(tmp_path: Path) -> None:
    address = ipc_address(str(tmp_path), "late")
    client = Client(address)
    for _ in range(2):
        call = asyncio.create_task(client.call("double", 2, reply=int, deadline=10))
        server = Server(Service(), address=address)
        await server.start()
        assert await call == 4
        await server.close()
    await client.close()


async def test_the_handler_is_cancelled_when_its_caller_gives_up(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, server, client):
        call = asyncio.create_task(client.call("wait", deadline=60))
        await service.started.wait()
        call.cancel()
        await asyncio.wait_for(service.cancelled.wait(), 5)
        with pytest.raises(asyncio.CancelledError):
            await call
        await soon(lambda: not server._running)


async def test_the_handler_does_not_outlive_the_deadline_of_a_caller_that_vanished(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, server, client):
        call = asyncio.create_task(client.call("wait", deadline=0.2))
        await service.started.wait()
        client._disconnect()  # like a killed process: it tells nobody
        client._closed = True
        await asyncio.wait_for(service.cancelled.wait(), 5)
        await soon(lambda: not server._running)
        with pytest.raises(DeadlineError):
            await call


async def test_closing_the_server_cancels_its_handlers(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, server, client):
        call = asyncio.create_task(client.call("wait", deadline=0.3))
        await service.started.wait()
        await server.close()
        assert service.cancelled.is_set()
        with pytest.raises(DeadlineError):
            await call


async def test_a_call_may_end_the_server_and_still_gets_its_reply(tmp_path: Path) -> None:
    for _ in range(20):
        async with serving(tmp_path) as (service, server, client):
            call = asyncio.create_task(client.call("open", deadline=5))
            await service.gate.wait()
            await server.close()
            await call


async def test_a_handler_may_close_its_own_server(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, server, client):
        call = asyncio.create_task(client.call("wait", deadline=0.3))
        await service.started.wait()
        with pytest.raises(DeadlineError):
            await client.call("stop", deadline=0.2)
        assert not server._running
        with pytest.raises(DeadlineError):
            await call


async def test_closing_the_client_fails_its_pending_calls(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _, client):
        call = asyncio.create_task(client.call("wait", deadline=60))
        await service.started.wait()
        await client.close()
        with pytest.raises(WireError, match="was closed during the call"):
            await call
        with pytest.raises(WireError, match="is closed"):
            await client.call("double", 1, reply=int, deadline=5)


@pytest.mark.parametrize(
    ("method", "request_value", "reason", "text"),
    [
        ("absent", None, "unknown method", "no method 'absent'"),
        ("private", None, "unknown method", "no method 'private'"),
        ("__init__", None, "unknown method", "no method '__init__'"),
        ("double", "2", "wrong type", "double: a message of the wrong type"),
        ("double", None, "wrong type", "Expected `int`, got `None`"),
        ("pair", ["1", 2], "wrong type", "Expected `int`, got `str` - at `Pair.first`"),
        ("fill", 1, "wrong type", "fill: a message of the wrong type"),
    ],
)
async def test_a_refused_call_is_counted_and_told_and_the_server_lives_on(
    tmp_path: Path, method: str, request_value: object, reason: str, text: str
) -> None:
    async with serving(tmp_path) as (_, server, client):
        with pytest.raises(WireError if reason == "unknown method" else ContractError, match=text) as told:
            await client.call(method, request_value, deadline=5)
        assert told.value.fix
        assert server.refused == {reason: 1}
        assert await client.call("double", 1, reply=int, deadline=5) == 2


async def test_a_reply_of_another_type_is_an_error_that_names_the_method(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client):
        with pytest.raises(WireError, match=r"the reply to double from .*: a message of the wrong type"):
            await client.call("double", 1, reply=str, deadline=5)


@pytest.mark.parametrize(
    ("limits", "reason"),
    [
        (Limits(header_bytes=1000), "header too large"),
        (Limits(frame_bytes=20_000), "frame too large"),
        (Limits(frames=2), "too many frames"),
    ],
)
async def test_a_message_over_the_server_s_bounds_is_refused_and_counted(
    tmp_path: Path, limits: Limits, reason: str
) -> None:
    rows, long = np.zeros(2, np.int64), Ragged.from_arrays([np.zeros(2000)] * 2)
    many = Batch(rows=rows, columns={str(i): long for i in range(5)})
    request = "x" * 2000 if reason == "header too large" else Fill(many, 0.0)
    async with serving(tmp_path, limits=limits) as (_, server, client):
        with pytest.raises((WireError, ContractError)):
            await client.call("fill", request, deadline=0.3)
        assert server.refused == {reason: 1}
        assert await client.call("double", 1, reply=int, deadline=5) == 2


async def test_a_message_of_far_too_many_frames_is_refused(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=Limits(frames=4)) as (_, server, client):
        assert await client.call("double", 1, reply=int, deadline=5) == 2
        assert client._endpoint is not None
        client._endpoint.send([b"\x95\x00\x63\xa6double\xcb\x40\x14\x00\x00\x00\x00\x00\x00\x01"] + [b"x"] * 10_000)
        await soon(lambda: server.refused["too many frames"] == 1)


async def test_a_client_does_not_send_what_is_over_its_own_bounds(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server, _):
        client = Client(ipc_address(str(tmp_path), "service"), limits=Limits(header_bytes=100))
        with pytest.raises(ContractError, match="fail: a message header of 2"):
            await client.call("fail", "x" * 200, deadline=5)
        await client.close()
        assert not server.refused


async def test_a_reply_over_the_bounds_is_an_error_at_the_caller(tmp_path: Path) -> None:
    async with serving(tmp_path, limits=Limits(frame_bytes=20_000)) as (_, _, client):
        assert len(await client.call("zeros", 20_000, reply=Array, deadline=5)) == 20_000
        with pytest.raises(WireError, match="an array of 20,001 bytes"):
            await client.call("zeros", 20_001, reply=Array, deadline=5)


async def test_a_second_server_does_not_take_over_an_address_in_use(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, server, client):
        second = Server(Service(), address=ipc_address(str(tmp_path), "service"))
        with pytest.raises(WireError, match="in use by another process"):
            await second.start()
        assert await client.call("double", 1, reply=int, deadline=5) == 2
        with pytest.raises(ValueError, match="started before"):
            await server.start()


async def test_a_socket_file_left_by_a_killed_process_does_not_block_a_restart(tmp_path: Path) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(tmp_path / "service.sock"))
    async with serving(tmp_path) as (_, _, client):
        assert await client.call("double", 1, reply=int, deadline=5) == 2


async def test_an_idle_server_and_client_use_no_processor_time(tmp_path: Path) -> None:
    async with serving(tmp_path) as (service, _, client):
        call = asyncio.create_task(client.call("wait", deadline=60))
        await service.started.wait()
        before = time.process_time()
        await asyncio.sleep(0.3)  # the idle time that is measured
        assert time.process_time() - before < 0.02
        await client.call("open", deadline=5)
        await call


async def test_staleness_errors_keep_their_four_parts_in_print(tmp_path: Path) -> None:
    async with serving(tmp_path) as (_, _, client):
        with pytest.raises(StalenessError) as raised:
            await client.call("fail", "StalenessError", deadline=5)
    assert str(raised.value) == "what happened\n  from: run.toml:3\n  fix:  do that"
