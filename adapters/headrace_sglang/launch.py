"""Starting SGLang's server beside the node, and ending it.

Invariant: the server ends with the node, however that ends; only this user can reach it.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.contract.setup import Setup
from headrace.errors import EngineError
from headrace_sglang.client import Client
from headrace_sglang.names import SAMPLING_BACKEND

TESTED = ("0.5.23",)

CPU_SETUP = Setup(
    lock=str(Path(__file__).parent / "locks" / "sglang-0.5.23-cpu.txt"),
    distributions=("sglang", "torch", "transformers"),
    python="==3.11.*",
    note="this SGLang is for CPUs; its torch is PyTorch's CPU build: where pip does not find it, "
    "set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu",
)

RESERVED = 6
"""Tokens that SGLang keeps free of each sequence's context."""

OWN = frozenset(
    {
        "api_key",
        "context_length",
        "dtype",
        "host",
        "incremental_streaming_output",
        "max_running_requests",
        "max_total_tokens",
        "model_path",
        "port",
        "sampling_backend",
        "skip_tokenizer_init",
        "weight_version",
    }
)
"""Arguments of SGLang's server that the adapter gives itself."""

QUIET = {"log_level": "warning", "skip_server_warmup": True}
"""At its start a server that tells more writes all its arguments, the key among them, to its log."""
HOST = "127.0.0.1"
START_SECONDS = 1800.0
_LOOK_SECONDS = 0.25
_END_SECONDS = 10.0


def served_as(*, slots: int, length: int, dtype: str) -> dict[str, Any]:
    """Arguments that a server must have been started with, whoever started it. ``length``: tokens of the longest
    sequence."""
    return {
        "context_length": length + RESERVED,
        "dtype": dtype,
        "incremental_streaming_output": True,
        "max_running_requests": slots,
        "sampling_backend": SAMPLING_BACKEND,
        "skip_tokenizer_init": True,
    }


class Server:
    """A child of this process, whose own children are in its process group."""

    def __init__(self, arguments: Mapping[str, Any], *, threads: int) -> None:
        """``arguments``: of SGLang's ``ServerArgs``. Call it from a thread that lives as long as the server is to."""
        self.key = secrets.token_urlsafe(32)
        port = _free_port()
        self.address = f"http://{HOST}:{port}"
        self._folder = tempfile.mkdtemp(prefix="headrace-sglang-")
        own = {"host": HOST, "port": port, "api_key": self.key, **QUIET}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "headrace_sglang.server", str(os.getpid())],
            stdin=subprocess.PIPE,
            env={**os.environ, **_environment(threads=threads, folder=self._folder)},
            process_group=0,
        )
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended already, which is told by check
            self._process.stdin.write(json.dumps({**own, **arguments}).encode())
            self._process.stdin.close()

    async def ready(self, client: Client) -> None:
        """Wait until it serves. EngineError when it has ended, or takes too long."""
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            self.check()
            with suppress(EngineError, TimeoutError):  # it does not listen yet
                await client.get("/ready", seconds=_LOOK_SECONDS * 4)
                return
            await asyncio.sleep(_LOOK_SECONDS)
        raise EngineError(
            f"SGLang's server does not serve after {START_SECONDS:.0f} s", fix="see the instance's log above"
        )

    def check(self) -> None:
        """EngineError when it has ended."""
        status = self._process.poll()
        if status is not None:
            raise EngineError(
                f"SGLang's server ended with status {status}", fix="see the instance's log above; it is started again"
            )

    async def close(self) -> None:
        """End it and what it has started, and wait for them."""
        await asyncio.to_thread(self._end)

    def _end(self) -> None:
        group = self._process.pid
        until = time.monotonic() + _END_SECONDS
        with suppress(ProcessLookupError):
            while time.monotonic() < until:
                os.killpg(group, signal.SIGKILL)
                self._process.poll()
                time.sleep(_LOOK_SECONDS / 10)
        self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)


def _environment(*, threads: int, folder: str) -> dict[str, str]:
    """What is set already is left, but where temporary files and sockets are: nobody else may reach those."""
    wanted = {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by what it reserves; never used for tokens
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    return {**{name: os.environ.get(name, value) for name, value in wanted.items()}, "TMPDIR": folder}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
