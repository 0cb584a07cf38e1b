"""Typed messages over a socket between two processes of one machine.

A message is the number of its frames, their lengths, and the frames that :func:`headrace.wire.encode` makes. The
socket is one of a pair without a name, that only the two processes have. Invariant: a message is received whole, or not
at all.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Sequence
from typing import Any, TypeAlias

from headrace.wire import DEFAULT_LIMITS, decode

Frames: TypeAlias = Sequence[bytes | bytearray | memoryview]
"""Of one message, as :func:`headrace.wire.encode` makes them."""
_LARGEST = max(DEFAULT_LIMITS.header_bytes, DEFAULT_LIMITS.frame_bytes)


class Closed(Exception):
    """The other side is gone."""


class Channel:
    """One end."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end

    def send(self, frames: Frames, *, seconds: float | None = None) -> None:
        """``seconds``: for which the other side may take nothing. Closed when the other side is gone, TimeoutError."""
        lengths = struct.pack(f"<I{len(frames)}Q", len(frames), *map(len, frames))
        self._socket.settimeout(seconds)
        try:
            self._socket.sendall(lengths)
            for frame in frames:
                self._socket.sendall(frame)
        except (BrokenPipeError, ConnectionResetError) as error:
            raise Closed from error

    def receive(self, kind: Any, *, seconds: float | None = None) -> Any:
        """A value of that type. ``seconds``: for which nothing may come. RefusedError for anything else, Closed when
        the other side is gone, TimeoutError."""
        self._socket.settimeout(seconds)
        (count,) = struct.unpack("<I", self._exactly(4))
        if not 1 <= count <= DEFAULT_LIMITS.frames + 1:
            raise Closed(f"a message of {count} frames")
        lengths = struct.unpack(f"<{count}Q", self._exactly(8 * count))
        if max(lengths) > _LARGEST:
            raise Closed(f"a frame of {max(lengths)} bytes")
        return decode([self._exactly(length) for length in lengths], kind)

    def _exactly(self, length: int) -> bytearray:
        buffer = bytearray(length)
        view = memoryview(buffer)
        while view:
            try:
                count = self._socket.recv_into(view)
            except ConnectionResetError as error:
                raise Closed from error
            if not count:
                raise Closed
            view = view[count:]
        return buffer

    def close(self) -> None:
        """The other side learns of it."""
        self._socket.close()
