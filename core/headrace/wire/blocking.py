"""Calls from code without an event loop, by the rules of :class:`headrace.wire.Client`.

Invariant: one thread at a time has calls under way at a client, of the process that made it. Any other is refused:
replies have no thread's name on them, and of a socket that is inherited through fork the threads that serve it are not
there, so that no wait for it would end.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Sequence
from math import ceil
from types import NoneType
from typing import Any, NamedTuple, TypeVar, overload

import msgspec
import zmq

from headrace.errors import ContractError, WireError
from headrace.wire.address import check_address
from headrace.wire.codec import check_limits, decoder_for, encode_call
from headrace.wire.failures import from_failure
from headrace.wire.handshakes import ClientHandshakes, connect_watched, silence
from headrace.wire.keys import Keys
from headrace.wire.limits import DEFAULT_LIMITS, Limits
from headrace.wire.messages import Call, Cancel, Failure, Reply, check_deadline
from headrace.wire.refusal import RefusedError
from headrace.wire.sockets import Context, Socket

R = TypeVar("R")

_RCVMORE, _SNDMORE = int(zmq.RCVMORE), int(zmq.SNDMORE)
_ZERO_COPY_BYTES = 1 << 16
TURN_SECONDS = 2.0
"""How often whoever waits looks whether it is worth it; one value for all calls, since setting it costs a call."""
Meanwhile = Callable[[float], None]
_decode = msgspec.msgpack.Decoder(Reply[msgspec.Raw] | Failure).decode
_encode = msgspec.msgpack.Encoder().encode


class Sent(NamedTuple):
    """A call whose reply is still to be received."""

    id: int
    method: str
    until: float
    seconds: float
    awaiting: str


class BlockingClient:
    """Connects at the first call, and anew after a call that met its deadline. WireError in a process that was forked
    from the one that made it."""

    def __init__(self, address: str, *, keys: Keys | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        check_address(address, keys=keys)
        self._process = os.getpid()
        self._address = address
        self._keys = keys
        self._limits = limits
        self._socket: Socket | None = None
        self._handshakes: ClientHandshakes | None = None
        """None once the server has answered."""
        self._milliseconds = 0
        """How long a send or a receive waits."""
        self._calls = 0
        self._alone = threading.RLock()
        """Held by the thread that has calls under way, once for each."""
        self._early: dict[int, tuple[Reply[msgspec.Raw] | Failure, list[memoryview]]] = {}
        """Replies to calls that are received later."""

    @overload
    def call(
        self,
        method: str,
        request: object = None,
        *,
        deadline: float,
        awaiting: str = "",
        meanwhile: Meanwhile | None = None,
    ) -> None: ...

    @overload
    def call(
        self,
        method: str,
        request: object = None,
        *,
        reply: type[R],
        deadline: float,
        awaiting: str = "",
        meanwhile: Meanwhile | None = None,
    ) -> R: ...

    def call(
        self,
        method: str,
        request: object = None,
        *,
        reply: Any = NoneType,
        deadline: float,
        awaiting: str = "",
        meanwhile: Meanwhile | None = None,
    ) -> Any:
        """Call ``method`` and wait at most ``deadline`` seconds. Raises as :meth:`headrace.wire.Client.call`, and what
        ``meanwhile`` raises."""
        return self.receive(self.send(method, request, deadline=deadline, awaiting=awaiting), reply, meanwhile)

    def send(self, method: str, request: object = None, *, deadline: float, awaiting: str = "") -> Sent:
        """Begin a call, so that several can be under way; :meth:`receive` or :meth:`cancel` ends it."""
        check_deadline(deadline)
        self._enter()
        try:
            return self._send(method, request, deadline, awaiting)
        except BaseException:
            self._alone.release()
            raise

    def _send(self, method: str, request: object, deadline: float, awaiting: str) -> Sent:
        self._calls += 1
        message, arrays = encode_call(Call(self._calls, method, deadline, request), self._limits)
        socket = self._connected()
        self._wait_at_most(deadline)
        try:
            socket.send(message, _SNDMORE if arrays else 0)
            for number, array in enumerate(arrays, 1):
                more = _SNDMORE if number < len(arrays) else 0
                socket.send(array, more, copy=len(array) < _ZERO_COPY_BYTES)
        except zmq.Again:
            raise WireError(f"{self._address} takes no more messages: its queue is full") from None
        return Sent(self._calls, method, time.monotonic() + deadline, deadline, awaiting)

    def receive(self, sent: Sent, reply: type[R], meanwhile: Meanwhile | None = None) -> R:
        """The reply to a call. ``meanwhile``: is told after each ``TURN_SECONDS`` how many seconds are left; what it
        raises ends the call. It must not use this client."""
        try:
            answer, arrays = self._early.pop(sent.id) if sent.id in self._early else self._await(sent, meanwhile)
        finally:
            self._alone.release()
        if isinstance(answer, Failure):
            raise from_failure(answer)
        try:
            check_limits(len(answer.body), arrays, self._limits)
            value: R = decoder_for(reply).decode(answer.body, arrays)
            return value
        except RefusedError as refusal:
            raise WireError(f"the reply to {sent.method} from {self._address}: {refusal.message}") from refusal

    def cancel(self, sent: Sent) -> None:
        """The reply to a call is not waited for, and the server need not go on."""
        if self._early.pop(sent.id, None) is None and self._socket is not None:
            self._socket.sndtimeo, self._milliseconds = 0, 0
            with contextlib.suppress(zmq.Again):  # the server knows the deadline
                self._socket.send(_encode(Cancel(sent.id)))
        self._alone.release()

    def arrived(self, sent: Sent) -> bool:
        """Whether the reply to a call is here."""
        while sent.id not in self._early and self._connected().poll(0):
            received = self._receive(1.0)
            if received is not None:
                self._early[received[0].id] = received
        return sent.id in self._early

    def watch(self, poller: zmq.Poller) -> None:
        """Have a poller wake when something arrives."""
        poller.register(self._connected(), zmq.POLLIN)

    def close(self) -> None:
        """Twice is fine; in a forked process it does nothing."""
        if self._process != os.getpid():
            return
        self._enter()
        self._disconnect(linger=0)
        self._alone.release()

    def _disconnect(self, *, linger: int) -> None:
        """``linger``: milliseconds that what was sent has to leave, in the background."""
        self._end_handshakes()
        if self._socket is not None:
            self._socket.close(linger=linger)
            self._socket = None

    def _end_handshakes(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None

    def _enter(self) -> None:
        if self._process != os.getpid():
            raise WireError(
                f"the client of {self._address} was made by process {self._process}, from which this one was forked",
                fix="make another in this process: neither clients nor data planes and partitions outlive a fork",
            )
        if not self._alone.acquire(blocking=False):
            raise ContractError(
                f"thread {threading.current_thread().name!r} uses a client of {self._address} while another does",
                fix="give each thread its own: a DataPlane, and what it makes, is one thread's view",
            )

    def _connected(self) -> Socket:
        if self._socket is None:
            self._milliseconds = 0
            context: Context = zmq.Context.instance()
            self._socket, self._handshakes = connect_watched(
                context, self._address, keys=self._keys, limits=self._limits
            )
        return self._socket

    def _wait_at_most(self, seconds: float) -> None:
        """Or for a turn. Setting what is set costs more than a small message."""
        milliseconds = ceil(min(seconds, TURN_SECONDS) * 1000)
        if milliseconds != self._milliseconds:
            socket = self._connected()
            socket.set(zmq.SNDTIMEO, milliseconds)
            socket.set(zmq.RCVTIMEO, milliseconds)
            self._milliseconds = milliseconds

    def _await(self, sent: Sent, meanwhile: Meanwhile | None) -> tuple[Reply[msgspec.Raw] | Failure, list[memoryview]]:
        while (left := sent.until - time.monotonic()) > 0:
            received = self._receive(left)
            if received is None:
                self._look(sent, meanwhile)
                continue
            answer, arrays = received
            if answer.id == sent.id:
                return answer, arrays
            if answer.id > sent.id:  # of a call that began later; an earlier one was given up
                self._early[answer.id] = received
        what = f", awaiting {sent.awaiting}" if sent.awaiting else ""
        message = f"no reply to {sent.method} from {self._address} in {sent.seconds:g} s{what}"
        error = silence(message, self._handshakes)
        self._give_up(sent.id)
        raise error

    def _look(self, sent: Sent, meanwhile: Meanwhile | None) -> None:
        """Whether it is worth waiting on."""
        left = sent.until - time.monotonic()
        if meanwhile is None or left <= 0:
            return
        try:
            meanwhile(left)
        except BaseException:  # whatever it was, nobody waits any more; raised again
            self._give_up(sent.id)
            raise

    def _receive(self, seconds: float) -> tuple[Reply[msgspec.Raw] | Failure, list[memoryview]] | None:
        socket = self._connected()
        self._wait_at_most(seconds)
        try:
            header = socket.recv()
        except zmq.Again:
            return None
        self._end_handshakes()
        arrays: list[memoryview] = []
        while socket.get(_RCVMORE):
            frame = socket.recv(copy=False)
            if len(arrays) <= self._limits.frames:
                arrays.append(frame.buffer)
        try:
            return _decode(header), arrays
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise WireError(f"{self._address} sent a malformed reply: {error}") from error

    def _give_up(self, call: int) -> None:
        """The server need not go on. libzmq may have given the connection up, so the next call makes a new one."""
        if self._socket is not None:
            self._socket.sndtimeo = 0
            with contextlib.suppress(zmq.Again):  # the server knows the deadline
                self._socket.send(_encode(Cancel(call)))
            self._disconnect(linger=100)


def first_answered(calls: Sequence[tuple[BlockingClient, Sent]]) -> int:
    """The place of a call whose reply is here, or whose time is over: receiving it takes no time."""
    poller = zmq.Poller()
    for client, _ in calls:
        client.watch(poller)
    while True:
        for place, (client, sent) in enumerate(calls):
            if client.arrived(sent) or sent.until <= time.monotonic():
                return place
        poller.poll(max(1, int(1000 * (min(sent.until for _, sent in calls) - time.monotonic()))))
