"""Handshakes that fail, of which ZeroMQ tells at a socket beside the one that they are of.

Neither side hears of the other's keys: a server ends the connection, and a client sees no more than that.
"""

from __future__ import annotations

import itertools
from collections import Counter

import zmq
from zmq.utils.monitor import parse_monitor_message

from headrace.errors import SilenceError, WireError
from headrace.wire.endpoint import Endpoint
from headrace.wire.keys import Keys
from headrace.wire.limits import Limits
from headrace.wire.messages import SILENCE_FIX
from headrace.wire.refusal import NO_HANDSHAKE, WRONG_KEY
from headrace.wire.sockets import Context, Socket, client_socket, connect

_SUCCEEDED = int(zmq.EVENT_HANDSHAKE_SUCCEEDED)
_PROTOCOL, _AUTH = int(zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL), int(zmq.EVENT_HANDSHAKE_FAILED_AUTH)
_EVENTS = _SUCCEEDED | _PROTOCOL | _AUTH | int(zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL)
_CRYPTOGRAPHIC = int(zmq.PROTOCOL_ERROR_ZMTP_CRYPTOGRAPHIC)
_numbers = itertools.count()


class _Monitor:
    """Tells how handshakes of ``socket`` end, from now until :meth:`end`, which must come before the socket is closed:
    ZeroMQ's own thread waits for ever when it has something to tell and nobody is there."""

    def __init__(self, context: Context, socket: Socket) -> None:
        address = f"inproc://handshakes-{next(_numbers)}"
        self._socket = socket
        socket.monitor(address, _EVENTS)
        self.told = context.socket(zmq.PAIR)
        self.told.linger = 0
        self.told.rcvhwm = 0  # at a bound that thread would wait as well, and every socket with it
        self.told.connect(address)

    def end(self) -> None:
        """No more is wanted."""
        self._socket.monitor(None, 0)


class HandshakeCounter:
    """Of a server's socket: counts in ``refused`` peers that did not get in, on the running event loop. Of those whose
    server key is right and whose client key is not, the gate knows."""

    def __init__(self, context: Context, socket: Socket, refused: Counter[str]) -> None:
        self._refused = refused
        self._monitor = _Monitor(context, socket)
        self._endpoint = Endpoint(self._monitor.told, limits=Limits(frames=1), head=2, deliver=self._deliver)

    def close(self) -> None:
        """Before the socket is."""
        self._monitor.end()
        self._endpoint.close()

    def _deliver(self, head: list[bytes], _: list[memoryview]) -> None:
        told = parse_monitor_message(head)
        event, value = told["event"], told["value"]
        if event not in (_SUCCEEDED, _AUTH):
            self._refused[WRONG_KEY if (event, value) == (_PROTOCOL, _CRYPTOGRAPHIC) else NO_HANDSHAKE] += 1


class ClientHandshakes:
    """Of a client's socket, until it is known that it got in."""

    def __init__(self, context: Context, socket: Socket) -> None:
        self._monitor = _Monitor(context, socket)
        self._failed = ""

    def failure(self) -> str:
        """Why the last one failed; "" when it did not, or there was none yet."""
        while self._monitor.told.poll(0):
            self._failed = _in_words(parse_monitor_message(self._monitor.told.recv_multipart())["event"])
        return self._failed

    def close(self) -> None:
        """It got in, or the socket is about to be closed."""
        self._monitor.end()
        self._monitor.told.close()


def connect_watched(
    context: Context, address: str, *, keys: Keys | None, limits: Limits
) -> tuple[Socket, ClientHandshakes]:
    """A DEALER that connects to ``address``, now or when somebody listens there. It is watched from before it connects:
    ZeroMQ gives a connection up for good when a handshake fails, and tells of it once."""
    socket = client_socket(context, address, keys=keys, limits=limits)
    handshakes = ClientHandshakes(context, socket)
    try:
        connect(socket, address)
    except WireError:
        handshakes.close()
        socket.close(linger=0)
        raise
    return socket, handshakes


def silence(message: str, handshakes: ClientHandshakes | None) -> SilenceError:
    """What a call ends with that met its deadline; says whether a handshake is why. None: the client got in."""
    failed = "" if handshakes is None else handshakes.failure()
    if not failed:
        return SilenceError(message, fix=SILENCE_FIX)
    return SilenceError(
        f"{message}; the handshake failed: {failed}",
        fix="give both sides the keys of one run: those that the server was started with, unchanged",
    )


def _in_words(event: int) -> str:
    if event == _SUCCEEDED:
        return ""
    if event == _AUTH:
        return "the server does not know this client's key"
    return "the server has another key than this client was given, or one side has none"
