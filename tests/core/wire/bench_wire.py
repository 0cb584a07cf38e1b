"""Round trips to another process: `python tests/core/wire/bench_wire.py [ipc|tcp]`. Microseconds, best and median."""

from __future__ import annotations

import asyncio
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable

import msgspec
import numpy as np

from headrace.contract import Batch, Ragged
from headrace.wire import Client, Keys, Server, ipc_address, rpc, tcp_address


class Echo:
    """Gives back what it gets."""

    @rpc
    async def number(self, request: int) -> int:
        """One number."""
        return request

    @rpc
    async def batch(self, request: Batch) -> Batch:
        """One batch."""
        return request


def rows(count: int = 256) -> Batch:
    """A training batch as the demo has it: three ragged columns and four dense ones."""
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 60, count)
    columns: dict[str, Ragged | np.ndarray] = {
        "tokens": Ragged.from_arrays([np.zeros(n, np.int32) for n in lengths]),
        "loss_mask": Ragged.from_arrays([np.zeros(n, bool) for n in lengths]),
        "behaviour_logprobs": Ragged.from_arrays([np.zeros(n, np.float32) for n in lengths]),
        "reward": np.zeros(count, np.float32),
        "group": np.zeros(count, np.int64),
        "version": np.zeros(count, np.int64),
    }
    return Batch(rows=np.arange(count), columns=columns)


async def serve(address: str, keys: Keys | None) -> None:
    """Until stdin ends."""
    server = Server(Echo(), address=address, keys=keys)
    print(await server.start(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await server.close()


async def measure(name: str, call: Callable[[], Awaitable[object]], *, number: int, rounds: int = 15) -> None:
    """Time ``number`` calls one after the other, and as many at once."""
    one, many = [], []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(number):
            await call()
        one.append((time.perf_counter() - start) / number * 1e6)
        start = time.perf_counter()
        await asyncio.gather(*(call() for _ in range(number)))
        many.append((time.perf_counter() - start) / number * 1e6)
    print(
        f"{name:24} one at a time {min(one):7.0f} / {statistics.median(one):7.0f}"
        f"   {number} at once {min(many):7.0f} / {statistics.median(many):7.0f}"
    )


async def main(transport: str) -> None:
    """Start the other process and measure."""
    keys = Keys.generate() if transport == "tcp" else None
    address = tcp_address("127.0.0.1") if keys else ipc_address(tempfile.mkdtemp(), "bench")
    command = [
        sys.executable,
        __file__,
        "serve",
        address,
        msgspec.json.encode(keys.to_dict() if keys else None).decode(),
    ]
    with subprocess.Popen(  # noqa: ASYNC220  # nothing else runs on this loop yet
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        client = Client(process.stdout.readline().strip(), keys=keys)
        batch = rows()
        for _ in range(200):
            await client.call("number", 1, reply=int, deadline=5)
        await measure("number", lambda: client.call("number", 1, reply=int, deadline=30), number=500)
        await measure("batch of 256 rows", lambda: client.call("batch", batch, reply=Batch, deadline=30), number=50)
        await client.close()
        process.communicate()


if __name__ == "__main__":
    if sys.argv[1:2] == ["serve"]:
        material = msgspec.json.decode(sys.argv[3], type=dict[str, str] | None)
        asyncio.run(serve(sys.argv[2], Keys.from_dict(material) if material else None))
    else:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "ipc"))
