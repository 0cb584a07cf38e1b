"""Sockets with their options set: the queue bound, the message bound, keys, and no lingering."""

from __future__ import annotations

from typing import TypeAlias

import zmq

from headrace.errors import WireError
from headrace.wire.address import check_address, check_free
from headrace.wire.keys import Keys
from headrace.wire.limits import Limits

Socket: TypeAlias = "zmq.Socket[bytes]"
Context: TypeAlias = "zmq.Context[zmq.Socket[bytes]]"

_ZAP_DOMAIN = b"headrace"
_RECONNECT_MS = 20
_RECONNECT_MAX_MS = 1000

_open_contexts: set[Context] = set()


def open_context() -> Context:
    """A context of one's own, to be ended with :func:`close_context`. It is kept alive until then: collecting a context
    whose sockets are collected with it would block the process for ever."""
    context: Context = zmq.Context()
    _open_contexts.add(context)
    return context


def close_context(context: Context) -> None:
    """Blocks until the addresses of its sockets, which are closed, are free again. libzmq closes listeners in the
    background, and one that is late would unlink the socket file of its successor."""
    context.term()
    _open_contexts.discard(context)


def bind_socket(context: Context, address: str, *, keys: Keys | None, limits: Limits) -> Socket:
    """A ROUTER bound to ``address``. WireError, and no socket left open, when that fails."""
    check_address(address, keys=keys)
    check_free(address)
    socket = _socket(context, zmq.ROUTER, address, limits)
    if keys is not None:
        socket.curve_server = True
        socket.curve_secretkey = keys.server_secret.encode()
        socket.zap_domain = _ZAP_DOMAIN
        # Without this libzmq lets everybody in whenever nobody answers its authentication requests.
        socket.set(zmq.ZAP_ENFORCE_DOMAIN, 1)
    try:
        socket.bind(address)
    except zmq.ZMQError as error:
        socket.close(linger=0)
        raise WireError(
            f"cannot listen on {address}: {error.strerror}", fix="free that address, or use tcp port 0"
        ) from error
    return socket


def bound_address(socket: Socket) -> str:
    """Where a bound socket is reached, with the port that the system chose."""
    return bytes(socket.get(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()


def client_socket(context: Context, address: str, *, keys: Keys | None, limits: Limits) -> Socket:
    """A DEALER that is to be connected to ``address``."""
    check_address(address, keys=keys)
    socket = _socket(context, zmq.DEALER, address, limits)
    if keys is not None:
        socket.curve_serverkey = keys.server_public.encode()
        socket.curve_publickey = keys.client_public.encode()
        socket.curve_secretkey = keys.client_secret.encode()
    socket.reconnect_ivl = _RECONNECT_MS
    socket.reconnect_ivl_max = _RECONNECT_MAX_MS
    return socket


def connect(socket: Socket, address: str) -> None:
    """Now, or when somebody listens there. WireError when that cannot be."""
    try:
        socket.connect(address)
    except zmq.ZMQError as error:
        raise WireError(f"cannot connect to {address}: {error.strerror}") from error


def connect_socket(context: Context, address: str, *, keys: Keys | None, limits: Limits) -> Socket:
    """A DEALER that connects to ``address``, now or when somebody listens there."""
    socket = client_socket(context, address, keys=keys, limits=limits)
    try:
        connect(socket, address)
    except WireError:
        socket.close(linger=0)
        raise
    return socket


def _socket(context: Context, kind: int, address: str, limits: Limits) -> Socket:
    socket = context.socket(kind)
    socket.linger = 0
    socket.ipv6 = address.startswith("tcp://[")
    socket.sndhwm = socket.rcvhwm = limits.queue
    socket.maxmsgsize = 2 * max(limits.frame_bytes, limits.header_bytes)
    return socket
