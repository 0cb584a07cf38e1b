"""A server that somebody else has started.

Invariant: it was started as the adapter needs it, and no other instance of this user has it.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from headrace.contract.inference import InferenceContext
from headrace.errors import EngineError
from headrace_sglang.backend import SglangBackend
from headrace_sglang.client import Client

KEY_VARIABLE = "SGLANG_API_KEY"
"""Environment variable with the server's key."""
SECONDS = 30.0
"""For an answer to what it was started with."""
_AT_LEAST = ("context_length", "max_running_requests")


class Attachment:
    """Holds a server for this process, until it is closed or the process ends."""

    def __init__(self, addresses: Sequence[str]) -> None:
        """The first that no other process has. EngineError when there is none."""
        for self.address in addresses:
            path = Path(tempfile.gettempdir()) / f"headrace-sglang-{os.getuid()}-{urlsplit(self.address).port}.lock"
            self._file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                os.close(self._file)
        raise EngineError(
            f"every server of SGLang at {', '.join(addresses)} is another instance's; each serves a version of its own",
            fix="name a server for each instance in rollout.address, or leave it out: instances start their own then",
        )

    def check(self) -> None:
        """Whether it lives is told by whether it answers."""

    async def close(self) -> None:
        """It goes on."""
        os.close(self._file)


async def attached(
    addresses: Sequence[str], context: InferenceContext, expected: Mapping[str, Any], *, length: int
) -> SglangBackend:
    """Which weights a server has nobody knows: it is given those of the model. ``expected``: arguments that it has to
    have been started with."""
    held = Attachment(addresses)
    client = Client(held.address, os.environ.get(KEY_VARIABLE))
    backend = SglangBackend(client, held, context=length)
    try:
        require_arguments(await client.get("/server_info", seconds=SECONDS), expected, held.address)
        await backend.load_file(context.model_path, context.version)
    except BaseException:  # cancelled too; raised again
        await backend.close()
        raise
    return backend


def require_arguments(told: Mapping[str, Any], expected: Mapping[str, Any], address: str) -> None:
    """EngineError when a server was started with other arguments than the adapter needs."""
    other = {
        name: told.get(name)
        for name, value in expected.items()
        if (told.get(name) != value if name not in _AT_LEAST else (told.get(name) or 0) < value)
    }
    if other:
        flags = " ".join(
            f"--{name.replace('_', '-')}" + ("" if value is True else f" {value}") for name, value in expected.items()
        )
        raise EngineError(
            f"SGLang's server at {address} serves with {other}, which the adapter cannot use",
            fix=f"start it in an environment that has headrace, with: {flags}",
        )
