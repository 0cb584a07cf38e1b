"""Prometheus metrics over HTTP: a page that is made when it is asked for, on the event loop whose state it tells of.

Nothing is measured between two requests. The text format is prometheus_client's, which the extra ``metrics`` brings.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import suppress
from typing import Any

from headrace.config.network import UNIX, check_listen, check_unshared, unserved

log = logging.getLogger(__name__)

_REQUEST_SECONDS = 10.0
_REQUEST_BYTES = 16384
Collect = Callable[[], Awaitable[Iterable[Any]]]
"""Answers with prometheus_client's metric families."""


class MetricsPage:
    """``listen``: ``HOST:PORT``, or ``unix:PATH`` for a socket in the file system."""

    def __init__(self, listen: str, collect: Collect) -> None:
        check_listen(listen)
        self._listen = listen
        self._collect = collect
        self._server: asyncio.Server | None = None
        self._answering: set[asyncio.Task[Any]] = set()

    async def start(self) -> str:
        """Serve; returns where, with the port that the system chose for port 0. ConfigError when that is taken."""
        check_unshared(self._listen)
        try:
            if self._listen.startswith(UNIX):
                path = self._listen.removeprefix(UNIX)
                self._server = await asyncio.start_unix_server(self._answer, path, limit=_REQUEST_BYTES)
                return self._listen
            host, _, port = self._listen.rpartition(":")
            self._server = await asyncio.start_server(self._answer, host.strip("[]"), int(port), limit=_REQUEST_BYTES)
        except OSError as error:
            raise unserved(self._listen, error.strerror or str(error)) from error
        return f"{host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Who waits for an answer gets none. Twice is fine."""
        if self._server is not None:
            self._server.close()
        answering = list(self._answering)
        for task in answering:
            task.cancel()
        await asyncio.gather(*answering, return_exceptions=True)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._answering.add(task)
        try:
            async with asyncio.timeout(_REQUEST_SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(await self._response(head.split(b"\r\n", 1)[0].split(b" ")))
                await writer.drain()
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass  # of whoever asked: nobody else need know
        except asyncio.CancelledError:
            pass  # by close: asyncio would log it as a fault
        finally:
            self._answering.discard(task)
            writer.close()
            with suppress(OSError):
                await writer.wait_closed()

    async def _response(self, request: list[bytes]) -> bytes:
        if len(request) != 3 or request[0] != b"GET":
            return _http(b"405 Method Not Allowed", "text/plain", b"GET /metrics\n")
        if request[1].partition(b"?")[0] not in (b"/", b"/metrics"):
            return _http(b"404 Not Found", "text/plain", b"there is /metrics\n")
        try:
            kind, text = exposition(await self._collect())
        except Exception:  # the supervisor of scrapes: what serves the page goes on
            log.exception("metrics could not be collected")
            return _http(b"500 Internal Server Error", "text/plain", b"see the log\n")
        return _http(b"200 OK", kind, text)


def exposition(families: Iterable[Any]) -> tuple[str, bytes]:
    """Content type and text."""
    from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

    registry: Any = CollectorRegistry(auto_describe=False)
    registry.register(_Collected(list(families)))
    text: bytes = generate_latest(registry)
    return CONTENT_TYPE_LATEST, text


class _Collected:
    def __init__(self, families: list[Any]) -> None:
        self._families = families

    def collect(self) -> list[Any]:
        return self._families


def _http(status: bytes, kind: str, body: bytes) -> bytes:
    head = b"HTTP/1.1 %b\r\nContent-Type: %b\r\nContent-Length: %d\r\nConnection: close\r\n\r\n"
    return head % (status, kind.encode(), len(body)) + body
