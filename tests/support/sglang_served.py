"""SGLang's servers, instances that are served by one, and the tiny models that they serve."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

from headrace.contract import InferenceContext
from headrace.testing.suites.serving import Served
from headrace_serving.checkpoint import read_checkpoint
from headrace_sglang.client import Client
from headrace_sglang.inference import SglangInferenceEngine
from headrace_sglang.launch import Server, served_as
from support.whole_runs import descendants

SLOTS = 4
KV_TOKENS = 4096


@contextmanager
def running_server(path: str) -> Iterator[Server]:
    """A server with the model at ``path``, as somebody else would have started it."""
    expected = served_as(slots=SLOTS, length=read_checkpoint(path).context, dtype="float32")
    server = Server({**expected, "model_path": path, "max_total_tokens": KV_TOKENS}, threads=1)
    try:
        _outside(_ready(server))
        yield server
    finally:
        _outside(server.close())


def _outside(work: Coroutine[Any, Any, None]) -> None:
    """Of the event loop that the test may have."""
    with ThreadPoolExecutor(1) as other:
        other.submit(asyncio.run, work).result()


async def _ready(server: Server) -> None:
    client = Client(server.address, server.key)
    try:
        await server.ready(client)
    finally:
        await client.close()


@asynccontextmanager
async def started(path: str, **settings: Any) -> AsyncIterator[Served]:
    """An instance that serves the model at ``path`` as version 0, with a server of its own unless it has an address."""
    given = {"slots": SLOTS, **settings}
    if "address" not in given:
        given.setdefault("kv_tokens", KV_TOKENS)
    engine = SglangInferenceEngine(SglangInferenceEngine.Settings(**given))
    await engine.start(InferenceContext(name="rollout-0", model_path=path, version=0, threads=1))
    served = Served(engine, path, deadline=60.0)
    try:
        yield served
    finally:
        await served.close()


def engine_processes() -> list[int]:
    """What SGLang has started below this process."""
    return [pid for pid in descendants(os.getpid()) if b"sglang" in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
