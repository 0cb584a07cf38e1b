"""What a scoring pool and its workers say to each other over a private socket pair.

A message on the stream: the number of frames (uint32), their sizes in bytes (uint64 each), the frames of
:func:`headrace.wire.encode`; little-endian. Invariant: a reply is bounded before it is read, because the process
that sends it has run foreign code.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterator
from typing import Any

import msgspec

from headrace.contract import EnvironmentContext, Episode, Score, Task
from headrace.wire import encode

REPLY_BYTES = 1 << 20
"""Bound of one reply."""
READ_BYTES = 1 << 18
"""What a worker takes from its socket at once."""

_COUNT = struct.Struct("<I")


class ScoringSetup(msgspec.Struct, frozen=True, kw_only=True):
    """First message to a worker: ``factory(context=context, **arguments)`` gives the started environment."""

    factory: str
    """``module:function``."""
    arguments: dict[str, Any]
    context: EnvironmentContext


class ScoringRequest(msgspec.Struct, frozen=True, kw_only=True):
    """One episode to score. Requests are answered in order, one reply each."""

    task: Task
    episode: Episode


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment is started."""


class Scored(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment's score."""

    score: Score


class Raised(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The environment raised: at start, or on one episode."""

    error: str
    """The exception's class."""
    message: str
    origin: str = ""
    fix: str = ""
    detail: str = ""
    """The traceback from the first frame that is not Headrace's, without its middle when it is long."""


Reply = Ready | Scored | Raised


def pack(value: object) -> bytes:
    """One message as bytes."""
    frames = [memoryview(frame).cast("B") for frame in encode(value)]
    sizes = struct.pack(f"<{len(frames)}Q", *(frame.nbytes for frame in frames))
    return b"".join([_COUNT.pack(len(frames)), sizes, *frames])


class Unpacker:
    """Bytes as they arrive to messages. ``limit``: bound of one message's bytes."""

    def __init__(self, *, limit: int) -> None:
        self._limit = limit
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Iterator[list[bytes]]:
        """Frames of every message that ``data`` completes. ValueError when one is over the limit."""
        self._buffer += data
        while (frames := self._next()) is not None:
            yield frames

    def _next(self) -> list[bytes] | None:
        buffer = self._buffer
        if len(buffer) < _COUNT.size:
            return None
        (count,) = _COUNT.unpack_from(buffer)
        start = _COUNT.size + 8 * count
        if start > self._limit:
            raise ValueError(f"a message of {count} frames; at most {self._limit} bytes are allowed")
        if len(buffer) < start:
            return None
        sizes = struct.unpack_from(f"<{count}Q", buffer, _COUNT.size)
        end = start + sum(sizes)
        if end > self._limit:
            raise ValueError(f"a message of {end} bytes; at most {self._limit} are allowed")
        if len(buffer) < end:
            return None
        frames = []
        for size in sizes:
            frames.append(bytes(buffer[start : start + size]))
            start += size
        del buffer[:end]
        return frames


def received(connection: socket.socket) -> Iterator[list[bytes]]:
    """Frames of every message, blocking between them, until the other side closes. For the worker's side, which
    trusts its pool: messages are not bounded."""
    unpacker = Unpacker(limit=sys.maxsize)
    while data := connection.recv(READ_BYTES):
        yield from unpacker.feed(data)
