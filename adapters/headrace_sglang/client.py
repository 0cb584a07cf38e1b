"""The HTTP interface of SGLang's server, over one session.

Invariant: whatever keeps an answer from coming is an EngineError that says what was asked.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from headrace.errors import EngineError

CONTROL_SECONDS = 600.0
"""For an answer to anything but a request for tokens: loading a large model is the longest."""
_LINE_BYTES = 1 << 24
_EVENT, _END = b"data: ", b"[DONE]"
_FIX = "see the server's log for what happened to it"


class Client:
    """``key``: for servers that ask for one."""

    def __init__(self, address: str, key: str | None) -> None:
        import aiohttp

        self._aiohttp: Any = aiohttp
        self._address = address.rstrip("/")
        self._session: Any = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            # The server ends connections that are idle, at the very moment maybe when one would be used again.
            connector=aiohttp.TCPConnector(limit=0, force_close=True),
            timeout=aiohttp.ClientTimeout(total=None),
            read_bufsize=_LINE_BYTES,
            trust_env=False,
        )

    async def get(self, path: str, *, seconds: float = CONTROL_SECONDS) -> Any:
        """The answer, from JSON. TimeoutError after ``seconds``."""
        return await self._ask("GET", path, None, seconds)

    async def post(self, path: str, body: Mapping[str, Any], *, seconds: float | None = CONTROL_SECONDS) -> Any:
        """As :meth:`get`."""
        return await self._ask("POST", path, body, seconds)

    async def events(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        """Answers that are streamed (server-sent events), from JSON."""
        with self._told(path):
            async with self._session.post(self._address + path, json=body) as response:
                await self._require_success(response, path)
                async for line in response.content:
                    event = line.removeprefix(_EVENT).strip()
                    if line.startswith(_EVENT) and event != _END:
                        yield _without_error(json.loads(event), path)

    async def _ask(self, method: str, path: str, body: Mapping[str, Any] | None, seconds: float | None) -> Any:
        timeout = self._aiohttp.ClientTimeout(total=seconds)
        with self._told(path):
            async with self._session.request(method, self._address + path, json=body, timeout=timeout) as response:
                await self._require_success(response, path)
                text = await response.text()
        return json.loads(text) if text.startswith(("{", "[")) else text

    @contextmanager
    def _told(self, path: str) -> Iterator[None]:
        try:
            yield
        except TimeoutError:  # also one of aiohttp's errors
            raise
        except self._aiohttp.ClientError as error:
            raise EngineError(
                f"SGLang's server at {self._address} was lost while it was asked for {path}: {error!r}", fix=_FIX
            ) from error

    async def _require_success(self, response: Any, path: str) -> None:
        if response.status != 200:
            text = (await response.text())[:500]
            raise EngineError(f"SGLang's server answered {path} with status {response.status}: {text}", fix=_FIX)

    async def close(self) -> None:
        """Whatever is still asked for is given up."""
        await self._session.close()


def _without_error(event: Any, path: str) -> Any:
    if "error" in event:
        raise EngineError(f"SGLang's server answered {path} with an error: {event['error']}", fix=_FIX)
    return event
