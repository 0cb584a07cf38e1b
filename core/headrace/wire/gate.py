"""Lets holders of the run's client key in, and nobody else (ZeroMQ's ZAP, RFC 27).

libzmq asks over inproc; one gate per context, so whoever serves with keys has a context of its own.
"""

from __future__ import annotations

import hmac
from collections import Counter

import zmq
from zmq.utils import z85

from headrace.wire.endpoint import Endpoint
from headrace.wire.keys import Keys
from headrace.wire.limits import Limits
from headrace.wire.refusal import WRONG_KEY
from headrace.wire.sockets import Context

_ADDRESS = "inproc://zeromq.zap.01"
_REQUEST_FRAMES = 9
"""Routing id, delimiter, version, request id, domain, address, peer's routing id, mechanism, credentials."""


class Gate:
    """For a thread that polls: whenever ``socket`` is readable, call :meth:`answer`. Peers wait until then.
    ``refused`` counts those turned away."""

    def __init__(self, context: Context, keys: Keys, refused: Counter[str]) -> None:
        self._client_key = z85.decode(keys.client_public.encode())
        self._refused = refused
        self.socket = context.socket(zmq.ROUTER)
        self.socket.bind(_ADDRESS)

    def answer(self) -> None:
        """Answer one authentication request."""
        self.socket.send_multipart(self._verdict(self.socket.recv_multipart()))

    def close(self) -> None:
        """Nobody is let in any more. Twice is fine."""
        self.socket.close(linger=0)

    def _verdict(self, parts: list[bytes]) -> list[bytes]:
        route, delimiter, version, request, *_rest = parts
        known = (
            len(parts) == _REQUEST_FRAMES and parts[7] == b"CURVE" and hmac.compare_digest(parts[8], self._client_key)
        )
        if not known:
            self._refused[WRONG_KEY] += 1
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        return [route, delimiter, version, request, status, text, b"", b""]


class LoopGate(Gate):
    """Answers by itself, on the running event loop, until closed."""

    def __init__(self, context: Context, keys: Keys, refused: Counter[str]) -> None:
        super().__init__(context, keys, refused)
        self._endpoint = Endpoint(self.socket, limits=Limits(frames=1), head=_REQUEST_FRAMES, deliver=self._deliver)

    def close(self) -> None:
        self._endpoint.close()

    def _deliver(self, parts: list[bytes], _: list[memoryview]) -> None:
        self._endpoint.send(self._verdict(parts))
