"""Serves the rpc methods of objects: a call is a task of the loop, unless it can be answered at once.

Invariants: a message that is not a valid call never ends the server, it is counted in ``refused``; no handler
outlives its caller's deadline, nor the server.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from time import perf_counter
from typing import Any

import msgspec

from headrace.errors import HeadraceError, RunError, WireError
from headrace.wire.arrays import Buffer
from headrace.wire.codec import check_limits, encode
from headrace.wire.endpoint import Endpoint
from headrace.wire.failures import to_failure, unexpected
from headrace.wire.gate import LoopGate
from headrace.wire.handshakes import HandshakeCounter
from headrace.wire.keys import Keys
from headrace.wire.latency import Latency
from headrace.wire.limits import DEFAULT_LIMITS, Limits
from headrace.wire.messages import Call, Cancel, Failure, Reply
from headrace.wire.methods import Method, methods_of
from headrace.wire.promise import Promise
from headrace.wire.refusal import HEADER_TOO_LARGE, MALFORMED, UNKNOWN_METHOD, RefusedError, to_caller
from headrace.wire.sockets import Context, bind_socket, bound_address, close_context, open_context

logger = logging.getLogger(__name__)

_decode = msgspec.msgpack.Decoder(Call[msgspec.Raw] | Cancel).decode
_encode = msgspec.msgpack.Encoder().encode

_TO_NO_CALL = _encode(Reply(0, None))
"""Calls are counted from 1 on: whoever gets this passes over it."""
_LINGER_MS = 200
"""So that the reply to a call that ends the server still leaves it."""


class Server:
    """``refused`` counts messages and peers turned away, by reason. ``log``: the file that this process logs to, named
    to whoever makes a call that raises; empty: nobody knows."""

    def __init__(
        self,
        *services: object,
        address: str,
        keys: Keys | None = None,
        limits: Limits = DEFAULT_LIMITS,
        log: str = "",
    ) -> None:
        self.refused: Counter[str] = Counter()
        self._methods = {name: method for service in services for name, method in methods_of(service).items()}
        self._address = address
        self._keys = keys
        self._limits = limits
        self._log = log
        self._running: dict[tuple[bytes, int], asyncio.Future[Any]] = {}
        self._endpoint: Endpoint | None = None
        self._gate: LoopGate | None = None
        self._handshakes: HandshakeCounter | None = None
        self._context: Context | None = None

    @property
    def latencies(self) -> dict[str, Latency]:
        """How long calls of each method took, waits for what was not there yet included."""
        return {name: method.latency for name, method in self._methods.items()}

    async def start(self) -> str:
        """Listen; returns the bound address. WireError when the address cannot be used."""
        if self._endpoint is not None:
            raise ValueError(f"the server of {self._address} was started before")
        context = self._context = open_context()
        if self._keys is not None:
            self._gate = LoopGate(context, self._keys, self.refused)
        try:
            socket = bind_socket(context, self._address, keys=self._keys, limits=self._limits)
        except WireError:
            await self.close()
            raise
        socket.router_mandatory = True  # or an answer to a caller that is gone would be dropped without a word
        self._handshakes = HandshakeCounter(context, socket, self.refused)
        self._endpoint = Endpoint(socket, limits=self._limits, head=2, deliver=self._deliver)
        self._address = bound_address(socket)
        return self._address

    async def close(self) -> None:
        """Take no more calls, cancel running handlers and wait for them. Twice is fine. A handler that calls it ends as
        the last one, without a reply."""
        if self._handshakes is not None:
            self._handshakes.close()
            self._handshakes = None
        if self._endpoint is not None:
            self._endpoint.close(linger_ms=_LINGER_MS)
        running = [task for task in self._running.values() if task is not asyncio.current_task()]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        if self._gate is not None:
            self._gate.close()
        if self._context is not None:
            close_context(self._context)
            self._context = None

    def _deliver(self, head: list[bytes], arrays: list[memoryview]) -> None:
        try:
            self._accept(head, arrays)
        except RefusedError as refusal:
            self.refused[refusal.reason] += 1

    def _accept(self, head: list[bytes], arrays: list[memoryview]) -> None:
        route, header = head
        if len(header) > self._limits.header_bytes:
            raise RefusedError("a header over the limit", reason=HEADER_TOO_LARGE)
        try:
            message = _decode(header)
        except (msgspec.DecodeError, ValueError, RecursionError) as error:
            raise RefusedError(f"not a call: {error}", reason=MALFORMED) from error
        key = (route, message.id)
        if isinstance(message, Cancel):
            if key in self._running:
                self._running[key].cancel()
        elif key in self._running:
            raise RefusedError(f"a second call {message.id} of the same client", reason=MALFORMED)
        else:
            self._begin(key, message, arrays)

    def _begin(self, key: tuple[bytes, int], call: Call[msgspec.Raw], arrays: list[memoryview]) -> None:
        try:
            method, request = self._read(call, arrays)
        except RefusedError as refusal:
            self._fail(key, to_caller(call.method, refusal))
            raise
        if method.plain:
            self._answer(key, method, request, call.seconds)
        else:
            task = asyncio.get_running_loop().create_task(self._run(key, method, request, call.seconds))
            self._running[key] = task
            task.add_done_callback(lambda _: self._running.pop(key))  # one cancelled early never runs a line of its own

    def _answer(self, key: tuple[bytes, int], method: Method, request: Any, seconds: float) -> None:
        began = perf_counter()
        try:
            answer = method.call(request)
            if not isinstance(answer, asyncio.Future):
                self._reply(key, method, request, answer)
            elif answer.done():
                self._reply(key, method, request, answer.result())
            else:
                self._promise(key, method, request, answer, seconds)
                answer.add_done_callback(lambda _: method.latency.add(perf_counter() - began))
                return
        except Exception as error:
            self._raised(key, method, error)
        method.latency.add(perf_counter() - began)

    def _promise(
        self, key: tuple[bytes, int], method: Method, request: Any, answer: asyncio.Future[Any], seconds: float
    ) -> None:
        late = False

        def expire() -> None:
            nonlocal late
            late = True
            answer.cancel()

        timer = asyncio.get_running_loop().call_later(seconds, expire)
        self._running[key] = answer

        def ended() -> None:
            timer.cancel()
            del self._running[key]
            if answer.cancelled():
                if not late:  # a caller who gave up does not hear it; one whose deadline has come hears that
                    self._fail(key, _cancelled(method))
                return
            try:
                self._reply(key, method, request, answer.result())
            except Exception as error:
                self._raised(key, method, error)

        if isinstance(answer, Promise):
            answer.at_end(ended, has_caller=lambda: self._reaches(key[0]))
        else:
            answer.add_done_callback(lambda _: ended())

    def _read(self, call: Call[msgspec.Raw], arrays: list[memoryview]) -> tuple[Method, Any]:
        method = self._methods.get(call.method)
        if method is None:
            raise RefusedError(
                f"there is no method {call.method!r} at {self._address}, but {', '.join(sorted(self._methods))}",
                reason=UNKNOWN_METHOD,
                fix="name the address of a service that has it",
            )
        if arrays:  # the rest was looked at
            check_limits(len(call.body), arrays, self._limits)
        return method, method.request.decode(call.body, arrays)

    async def _run(self, key: tuple[bytes, int], method: Method, request: Any, seconds: float) -> None:
        task, began = asyncio.current_task(), perf_counter()
        assert task is not None
        timer = asyncio.get_running_loop().call_later(seconds, task.cancel)
        try:
            self._reply(key, method, request, await method.call(request))
        except asyncio.CancelledError:
            if not task.cancelling():
                self._fail(key, _cancelled(method))
        except Exception as error:
            self._raised(key, method, error)
        finally:
            timer.cancel()
            method.latency.add(perf_counter() - began)

    def _raised(self, key: tuple[bytes, int], method: Method, error: Exception) -> None:
        """What the handler raises goes to the caller: one call's bug ends that call, not the node."""
        if not isinstance(error, HeadraceError):
            logger.error("%s failed", method.name, exc_info=error)
            error = unexpected(method.name, error, log=self._log)
        self._fail(key, error)

    def _reply(self, key: tuple[bytes, int], method: Method, request: Any, answer: Any) -> None:
        message, *arrays = encode(Reply(key[1], answer))
        check_limits(len(message), arrays, self._limits)
        if not self._send(key, message, arrays) and method.take_back is not None:
            asyncio.get_running_loop().call_soon(method.take_back, request, answer)

    def _fail(self, key: tuple[bytes, int], error: HeadraceError) -> None:
        failure: Failure = to_failure(key[1], error)
        self._send(key, _encode(failure))

    def _reaches(self, route: bytes) -> bool:
        """Whether a client is there, as far as ZeroMQ knows, which says so only when something is sent."""
        return self._endpoint is not None and not self._endpoint.closed and self._endpoint.reaches([route, _TO_NO_CALL])

    def _send(self, key: tuple[bytes, int], message: Buffer, arrays: Sequence[Buffer] = ()) -> bool:
        """Whether it is on its way."""
        return (
            self._endpoint is not None and not self._endpoint.closed and self._endpoint.send([key[0], message, *arrays])
        )


def _cancelled(method: Method) -> RunError:
    return RunError(f"{method.name} was cancelled from within its own node")
