"""One ZeroMQ socket on one event loop.

The loop watches the socket's file descriptor; there is no thread, no timer and no task, so an idle socket
costs nothing. The descriptor is edge-triggered: after every use of the socket its event flags are looked at
again, which is the invariant that keeps messages from being overlooked.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import zmq

from headrace.errors import WireError
from headrace.wire.limits import Limits
from headrace.wire.refusal import TOO_MANY_FRAMES

_BURST = 64
"""Messages handled before other callbacks of the loop get their turn."""


class Endpoint:
    """Owns ``socket``. ``deliver`` gets the frames of every message, on the loop."""

    def __init__(
        self, socket: zmq.Socket[bytes], *, limits: Limits, deliver: Callable[[list[zmq.Frame]], None]
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._socket = socket
        self._max_frames = limits.frames + _ENVELOPE_FRAMES
        self._deliver = deliver
        self._loop = asyncio.get_running_loop()
        self._again: asyncio.Handle | None = None
        self._fd = socket.get(zmq.FD)
        self._loop.add_reader(self._fd, self._drain)
        self._look()

    def send(self, frames: Sequence[Any]) -> None:
        """Queue a message. WireError when the queue is full."""
        try:
            self._socket.send_multipart(frames, flags=zmq.NOBLOCK, copy=False)
        except zmq.Again:
            raise WireError("the send queue is full: the peer takes no messages") from None
        self._look()

    def close(self) -> None:
        """Drop what is queued. Twice is fine."""
        if not self._socket.closed:
            self._loop.remove_reader(self._fd)
            self._socket.close(linger=0)

    def _readable(self) -> bool:
        return not self._socket.closed and bool(self._socket.get(zmq.EVENTS) & zmq.POLLIN)

    def _look(self) -> None:
        if self._again is None and self._readable():
            self._again = self._loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._again = None
        try:
            for _ in range(_BURST):
                if not self._readable():
                    return
                frames = self._receive()
                if frames:
                    self._deliver(frames)
        finally:
            self._look()

    def _receive(self) -> list[zmq.Frame]:
        frames: list[zmq.Frame] = []
        more, surplus = True, False
        while more:
            frame = self._socket.recv(zmq.NOBLOCK, copy=False)
            more = frame.more
            surplus = surplus or len(frames) >= self._max_frames
            if not surplus:
                frames.append(frame)
        if surplus:
            self.refused[TOO_MANY_FRAMES] += 1
            return []
        return frames


_ENVELOPE_FRAMES = 2
"""Routing id and header."""
