"""Calls the rpc methods of a server.

Invariant: every call ends within its deadline, with a reply of the asked type or an error that says what was
awaited; a call that nobody waits for any more is cancelled at the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from types import NoneType
from typing import Any, NamedTuple, TypeVar, overload

import msgspec
import zmq

from headrace.errors import HeadraceError, WireError
from headrace.wire.address import check_address
from headrace.wire.arrays import Buffer
from headrace.wire.codec import TypedDecoder, check_limits, decoder_for, encode_call
from headrace.wire.endpoint import Endpoint
from headrace.wire.failures import from_failure
from headrace.wire.handshakes import ClientHandshakes, connect_watched, silence
from headrace.wire.keys import Keys
from headrace.wire.limits import DEFAULT_LIMITS, Limits
from headrace.wire.messages import Call, Cancel, Failure, Reply, check_deadline
from headrace.wire.refusal import RefusedError
from headrace.wire.sockets import Context

logger = logging.getLogger(__name__)

R = TypeVar("R")

_decode = msgspec.msgpack.Decoder(Reply[msgspec.Raw] | Failure).decode
_encode = msgspec.msgpack.Encoder().encode


class _Pending(NamedTuple):
    future: asyncio.Future[Any]
    timer: asyncio.TimerHandle
    method: str
    reply: TypedDecoder


class Client:
    """Used from one event loop; connects at the first call and again whenever the server comes back."""

    def __init__(self, address: str, *, keys: Keys | None = None, limits: Limits = DEFAULT_LIMITS) -> None:
        check_address(address, keys=keys)
        self._address = address
        self._keys = keys
        self._limits = limits
        self._endpoint: Endpoint | None = None
        self._handshakes: ClientHandshakes | None = None
        """None once the server has answered."""
        self._closed = False
        self._calls = 0
        self._pending: dict[int, _Pending] = {}

    @overload
    async def call(self, method: str, request: object = None, *, deadline: float, awaiting: str = "") -> None: ...

    @overload
    async def call(
        self, method: str, request: object = None, *, reply: type[R], deadline: float, awaiting: str = ""
    ) -> R: ...

    async def call(
        self, method: str, request: object = None, *, reply: Any = NoneType, deadline: float, awaiting: str = ""
    ) -> Any:
        """Call ``method`` and wait at most ``deadline`` seconds. ``awaiting``: in words, for the SilenceError.

        Raises what the handler raised when that is a HeadraceError, RunError when it is not, WireError when
        message or reply is refused.
        """
        return await self.submit(method, request, reply=reply, deadline=deadline, awaiting=awaiting)

    def submit(
        self, method: str, request: object = None, *, reply: Any = NoneType, deadline: float, awaiting: str = ""
    ) -> asyncio.Future[Any]:
        """:meth:`call` without waiting: the message is on its way, and the future has the outcome. Cancelling the
        future cancels the call at the server."""
        check_deadline(deadline)
        self._calls += 1
        call = self._calls
        self._connected()
        message, arrays = encode_call(Call(call, method, deadline, request), self._limits)
        loop = asyncio.get_running_loop()
        future: asyncio.Future[Any] = loop.create_future()
        what = f", awaiting {awaiting}" if awaiting else ""
        timer = loop.call_later(
            deadline, self._expire, call, f"no reply to {method} from {self._address} in {deadline:g} s{what}"
        )
        self._pending[call] = _Pending(future, timer, method, decoder_for(reply))
        try:
            self._send([message, *arrays])
        except WireError:
            self._forget(call)
            raise
        future.add_done_callback(lambda done: self._settled(call, done))
        return future

    async def close(self) -> None:
        """Pending calls fail with WireError. Twice is fine."""
        self._closed = True
        for call in list(self._pending):
            self._fail(call, WireError(f"the client of {self._address} was closed during the call"))
        self._disconnect()

    def _connected(self) -> Endpoint:
        if self._closed:
            raise WireError(f"the client of {self._address} is closed")
        if self._endpoint is not None and self._endpoint.loop is not asyncio.get_running_loop():
            raise ValueError(f"the client of {self._address} belongs to another event loop")
        if self._endpoint is None:
            context: Context = zmq.Context.instance()
            socket, self._handshakes = connect_watched(context, self._address, keys=self._keys, limits=self._limits)
            self._endpoint = Endpoint(socket, limits=self._limits, head=1, deliver=self._deliver)
        return self._endpoint

    def _send(self, frames: Sequence[Buffer]) -> None:
        endpoint = self._connected()
        if endpoint.send(frames):
            return
        if len(self._pending) > self._limits.queue:
            raise WireError(f"{len(self._pending)} calls of {self._address} are waiting for a reply; no more are sent")
        self._disconnect()
        self._connected().send(frames)

    def _disconnect(self) -> None:
        """Let the next call connect anew. libzmq gives a connection up for good, and does not always say so, when a
        handshake fails; by then another server may be there."""
        self._end_handshakes()
        if self._endpoint is not None:
            self._endpoint.close()
            self._endpoint = None

    def _end_handshakes(self) -> None:
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None

    def _expire(self, call: int, message: str) -> None:
        self._fail(call, silence(message, self._handshakes))

    def _fail(self, call: int, error: WireError) -> None:
        """The connection may be why: once nobody else waits for it, the next call makes a new one. The server cancels
        the handler by itself, since it knows the deadline."""
        future = self._forget(call)
        if not self._pending:
            self._disconnect()
        if not future.done():
            future.set_exception(error)

    def _forget(self, call: int) -> asyncio.Future[Any]:
        pending = self._pending.pop(call)
        pending.timer.cancel()
        return pending.future

    def _settled(self, call: int, future: asyncio.Future[Any]) -> None:
        if future.cancelled() and call in self._pending:
            self._forget(call)
            if self._endpoint is not None and not self._closed:
                self._endpoint.send([_encode(Cancel(call))])  # if it takes none, the server cancels at the deadline

    def _deliver(self, head: list[bytes], arrays: list[memoryview]) -> None:
        self._end_handshakes()
        try:
            answer = _decode(head[0])
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            logger.warning("%s sent a malformed reply: %s", self._address, error)
            return
        pending = self._pending.get(answer.id)
        if pending is None:
            return
        self._forget(answer.id)
        if pending.future.done():
            return
        try:
            pending.future.set_result(self._read(answer, arrays, pending))
        except HeadraceError as error:
            pending.future.set_exception(error)

    def _read(self, answer: Reply[msgspec.Raw] | Failure, arrays: list[memoryview], pending: _Pending) -> Any:
        if isinstance(answer, Failure):
            raise from_failure(answer)
        try:
            check_limits(len(answer.body), arrays, self._limits)
            return pending.reply.decode(answer.body, arrays)
        except RefusedError as refusal:
            raise WireError(f"the reply to {pending.method} from {self._address}: {refusal.message}") from refusal
