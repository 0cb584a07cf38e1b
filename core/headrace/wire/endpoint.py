"""One ZeroMQ socket on one event loop.

The loop watches the socket's file descriptor; there is no thread, no timer and no task, so an idle socket
costs nothing. The descriptor is edge-triggered: after every use of the socket that did not find it empty its event
flags are looked at again, which is the invariant that keeps messages from being overlooked.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import TypeAlias

import zmq

from headrace.wire.arrays import Buffer
from headrace.wire.limits import Limits
from headrace.wire.sockets import Socket

# Plain integers, copies of small frames and loops of one's own: pyzmq's enumerations, Frame objects and multipart
# helpers cost microseconds per use, more than everything else in a small message.
_EVENTS, _RCVMORE, _POLLIN = int(zmq.EVENTS), int(zmq.RCVMORE), int(zmq.POLLIN)
_NOBLOCK, _MORE = int(zmq.NOBLOCK), int(zmq.NOBLOCK | zmq.SNDMORE)
_BURST = 64
"""Messages handled before other callbacks of the loop get their turn."""
_ZERO_COPY_BYTES = 1 << 16
"""From here on a frame is sent without being copied."""

Deliver: TypeAlias = Callable[[list[bytes], list[memoryview]], None]


class Endpoint:
    """Owns ``socket``. ``deliver`` gets every message on the loop: its first ``head`` frames (fewer, when it has no
    more), and its arrays (of a message with too many, one more than allowed: enough to see that)."""

    def __init__(self, socket: Socket, *, limits: Limits, head: int, deliver: Deliver) -> None:
        self.loop = asyncio.get_running_loop()
        self._socket = socket
        self._head = head
        self._kept_arrays = limits.frames + 1
        self._deliver = deliver
        self._again: asyncio.Handle | None = None
        self._draining = False
        self._fd = int(socket.get(zmq.FD))
        self.loop.add_reader(self._fd, self._drain)
        self._look()

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Queue a message; large frames are not copied. False when the socket takes none, or knows that the peer is
        gone."""
        send = self._socket.send
        try:
            for frame in frames[:-1]:
                send(frame, _MORE, copy=len(frame) < _ZERO_COPY_BYTES)
            send(frames[-1], _NOBLOCK, copy=len(frames[-1]) < _ZERO_COPY_BYTES)
        except zmq.Again:  # only the first frame can meet this
            return False
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            return False
        finally:  # trying to send, too, may take note of what has arrived, of which the descriptor then says nothing
            if not self._draining:
                self._look()
        return True

    def reaches(self, frames: Sequence[Buffer]) -> bool:
        """:meth:`send`, when the socket has taken note of every peer that has left by now."""
        self._socket.get(_EVENTS)
        return self.send(frames)

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
        if self._socket.closed:
            return
        self._draining, empty = True, False
        try:
            for _ in range(_BURST):
                # A look costs less than an exception; the first one is saved, for something has arrived, most often.
                empty = not self._receive() or not self._readable()
                if empty:  # a socket that was found empty raises its descriptor again by itself
                    return
        finally:
            self._draining = False
            if not empty:
                self._look()

    def _receive(self) -> bool:
        """Deliver one message; whether there was one."""
        receive, get = self._socket.recv, self._socket.get
        arrays: list[memoryview] = []
        try:
            head = [receive(_NOBLOCK)]
        except zmq.Again:
            return False
        if self._head > 1:  # who sent it, and that is never all
            head.append(receive(_NOBLOCK))
        while get(_RCVMORE):
            if len(head) < self._head:
                head.append(receive(_NOBLOCK))
                continue
            frame = receive(_NOBLOCK, copy=False)
            if len(arrays) < self._kept_arrays:
                arrays.append(frame.buffer)
        self._deliver(head, arrays)
        return True
