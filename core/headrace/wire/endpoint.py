"""One ZeroMQ socket on one event loop.

The loop watches the socket's file descriptor; there is no thread, no timer and no task, so an idle socket
costs nothing. The descriptor is edge-triggered: after every use of the socket its event flags are looked at
again, which is the invariant that keeps messages from being overlooked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

import zmq

from headrace.wire.limits import Limits
from headrace.wire.sockets import Socket

# Plain integers: the enumerations of pyzmq cost a microsecond per use.
_EVENTS, _POLLIN, _NOBLOCK = int(zmq.EVENTS), int(zmq.POLLIN), int(zmq.NOBLOCK)
_BURST = 64
"""Messages handled before other callbacks of the loop get their turn."""
_ENVELOPE_FRAMES = 2
"""Routing id and header."""


class Endpoint:
    """Owns ``socket``. ``deliver`` gets the frames of every message, on the loop; of one with too many frames it gets
    one more than allowed, enough to see that."""

    def __init__(
        self,
        socket: Socket,
        *,
        limits: Limits,
        deliver: Callable[[list[zmq.Frame]], None],
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self._socket = socket
        self._kept_frames = _ENVELOPE_FRAMES + limits.frames + 1
        self._deliver = deliver
        self._again: asyncio.Handle | None = None
        self._fd = int(socket.get(zmq.FD))
        self.loop.add_reader(self._fd, self._drain)
        self._look()

    def send(self, frames: Sequence[object]) -> bool:
        """Queue a message; large buffers are not copied. False when the socket takes none."""
        try:
            self._socket.send_multipart(frames, flags=_NOBLOCK, copy=False)  # type: ignore[arg-type]  # any buffer will do
        except zmq.Again:
            return False
        self._look()
        return True

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return bool(self._socket.closed)

    def close(self, *, linger_ms: int = 0) -> None:
        """Stop listening at once; what is queued has ``linger_ms`` to leave, in the background. Twice is fine."""
        if not self._socket.closed:
            self.loop.remove_reader(self._fd)
            self._socket.close(linger=linger_ms)

    def _readable(self) -> bool:
        return not self._socket.closed and bool(int(self._socket.get(_EVENTS)) & _POLLIN)

    def _look(self) -> None:
        if self._again is None and self._readable():
            self._again = self.loop.call_soon(self._drain)

    def _drain(self) -> None:
        self._again = None
        drained = False
        try:
            for _ in range(_BURST):
                if not self._readable():
                    drained = True
                    return
                self._deliver(self._receive())
        finally:
            if not drained:
                self._look()

    def _receive(self) -> list[zmq.Frame]:
        frames: list[zmq.Frame] = []
        more = True
        while more:
            frame = self._socket.recv(_NOBLOCK, copy=False)
            more = frame.more
            if len(frames) < self._kept_frames:
                frames.append(frame)
        return frames
