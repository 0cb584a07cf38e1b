"""Instances of vLLM, and its servers."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.contract import InferenceContext
from headrace.testing.suites.serving import Served, manifest_of
from headrace.testing.tensors import read_tensors
from headrace_vllm.inference import VllmInferenceEngine
from headrace_vllm.server import ARGUMENTS
from support.whole_runs import descendants

KV_BYTES = 64 << 20


@asynccontextmanager
async def started(path: str, **settings: Any) -> AsyncIterator[Served]:
    """An instance that serves the model at ``path`` as version 0; ``address``: by a running server."""
    kind, own = (Attached, {}) if "address" in settings else (VllmInferenceEngine, {"kv_bytes": KV_BYTES})
    engine = kind(VllmInferenceEngine.Settings(**{"slots": 8, **own, **settings}))
    await engine.start(InferenceContext(name="rollout-0", model_path=path, version=0, threads=1))
    served = Served(engine, path, deadline=60.0)
    try:
        yield served
    finally:
        await served.close()


class Attached(VllmInferenceEngine):
    """Gives its server the model's weights at the start: it may have others of a test before."""

    async def start(self, context: InferenceContext) -> None:
        await super().start(replace(context, version=-1))
        tensors = read_tensors(context.model_path)
        update = await self.begin_update(manifest_of(tensors, context.version))
        for name, tensor in tensors.items():
            await update.apply(name, tensor)
        await update.commit()


@contextmanager
def server(path: str, log: Path, *, python: str = sys.executable) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """Address and process of a vLLM server with the model at ``path``, as the adapter needs it. ``log``: its output."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [python, "-m", "vllm.entrypoints.openai.api_server", "--model", path, *ARGUMENTS]
    command += ["--dtype", "float32", "--enforce-eager", "--max-num-seqs", "8"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--kv-cache-memory-bytes", str(KV_BYTES)]
    with log.open("wb") as written:
        process = subprocess.Popen(command, env=_server_environment(), stdout=written, stderr=written)
    address = f"http://127.0.0.1:{port}"
    try:
        while not _answers(f"{address}/health"):
            assert process.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
            time.sleep(0.1)  # the test's own time limit is the deadline
        yield address, process
    finally:
        process.terminate()
        process.wait()


def _server_environment() -> dict[str, str]:
    """As the adapter sets it for a vLLM of its own."""
    quick = {"TORCHDYNAMO_DISABLE": "1", "OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    offline = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    few = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
    return {**os.environ, **quick, **offline, **few, "VLLM_SERVER_DEV_MODE": "1"}


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except OSError:
        return False


def engine_processes() -> list[int]:
    """What vLLM has started below this process, less Python's own helper, which ends by itself."""
    return [pid for pid in descendants(os.getpid()) if b"resource_tracker" not in _command(pid)]


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has ended
        return b""
