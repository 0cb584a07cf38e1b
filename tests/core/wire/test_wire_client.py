"""Clients that nobody answers, and what is left when nobody closes."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import pytest

from headrace.errors import ContractError, DeadlineError, SilenceError, WireError
from headrace.wire import Client, Limits, ipc_address


async def test_a_server_that_is_not_there_is_noticed_by_the_deadline(tmp_path: Path) -> None:
    client = Client(ipc_address(str(tmp_path), "nobody"))
    with pytest.raises(DeadlineError, match="no reply to double"):
        await client.call("double", 1, reply=int, deadline=0.05)
    await client.close()


async def test_calls_beyond_the_queue_s_bound_fail_at_once(tmp_path: Path) -> None:
    client = Client(ipc_address(str(tmp_path), "nobody"), limits=Limits(queue=2))
    calls = [asyncio.create_task(client.call("double", 1, reply=int, deadline=0.2)) for _ in range(5)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert [type(outcome) for outcome in outcomes] == [SilenceError] * 2 + [WireError] * 3
    await client.close()


async def test_a_deadline_is_a_number_of_seconds(tmp_path: Path) -> None:
    client = Client(ipc_address(str(tmp_path), "nobody"))
    for deadline in (0, -1, float("nan"), float("inf")):
        with pytest.raises(ContractError, match="a deadline is"):
            await client.call("double", 1, reply=int, deadline=deadline)
    await client.close()


def test_a_client_belongs_to_one_event_loop(tmp_path: Path) -> None:
    client = Client(ipc_address(str(tmp_path), "nobody"))

    async def ask_elsewhere() -> None:
        with pytest.raises(ValueError, match="another event loop"):
            await client.call("double", 1, reply=int, deadline=0.01)

    async def both() -> None:
        call = asyncio.create_task(client.call("double", 1, reply=int, deadline=60))
        await asyncio.sleep(0)
        await asyncio.to_thread(asyncio.run, ask_elsewhere())
        await client.close()
        with pytest.raises(WireError, match="was closed"):
            await call

    asyncio.run(both())


FORGETFUL = """
import asyncio, gc, sys
from headrace.wire import Client, Server, ipc_address, rpc

class Service:
    @rpc
    async def wait(self, request: None) -> None:
        await asyncio.Event().wait()

async def main():
    server = Server(Service(), address=ipc_address(sys.argv[1], "forgotten"))
    client = Client(await server.start())
    call = asyncio.create_task(client.call("wait", deadline=600))
    await asyncio.sleep(0.05)
    raise RuntimeError("nobody closes anything")

try:
    asyncio.run(main())
except RuntimeError:
    gc.collect()
    print("collected")
"""


async def test_a_process_that_forgets_to_close_ends_all_the_same(tmp_path: Path) -> None:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-W", "ignore", "-c", FORGETFUL, str(tmp_path), stdout=asyncio.subprocess.PIPE
    )
    out, _ = await asyncio.wait_for(process.communicate(), 20)
    assert out == b"collected\n"
