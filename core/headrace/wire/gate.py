"""Lets holders of the run's client key in, and nobody else (ZeroMQ's ZAP, RFC 27).

libzmq asks over inproc; one handler per context, so a server with keys has a context of its own.
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
    """Answers authentication requests of ``context`` until closed."""

    def __init__(self, context: Context, keys: Keys, refused: Counter[str]) -> None:
        self._client_key = z85.decode(keys.client_public.encode())
        self._refused = refused
        socket = context.socket(zmq.ROUTER)
        socket.bind(_ADDRESS)
        self._endpoint = Endpoint(socket, limits=Limits(frames=1), head=_REQUEST_FRAMES, deliver=self._answer)

    def close(self) -> None:
        """Nobody is let in any more."""
        self._endpoint.close()

    def _answer(self, parts: list[bytes], _: list[memoryview]) -> None:
        route, delimiter, version, request, *_rest = parts
        known = (
            len(parts) == _REQUEST_FRAMES and parts[7] == b"CURVE" and hmac.compare_digest(parts[8], self._client_key)
        )
        if not known:
            self._refused[WRONG_KEY] += 1
        status, text = (b"200", b"OK") if known else (b"400", b"unknown key")
        self._endpoint.send([route, delimiter, version, request, status, text, b"", b""])
