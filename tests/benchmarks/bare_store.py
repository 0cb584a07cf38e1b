"""The least that a store of rows over ZeroMQ can do: keep the frames of a put, give the oldest put to who asks next.

No row is addressed, no column is ready by itself, nothing is leased or checked: what is left is the cost of moving the
bytes. One process, one ROUTER socket, no event loop; ``data_plane.py`` starts it and compares with it.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Mapping
from typing import Any

import msgspec
import numpy as np
import zmq

ZERO_COPY_BYTES = 1 << 16
RCVMORE, SNDMORE = int(zmq.RCVMORE), int(zmq.SNDMORE)
Array = np.ndarray[Any, Any]


class Header(msgspec.Struct, array_like=True):
    """``take``: the oldest put is wanted; else the columns of a put, name → (dtype, shape), in the order of frames."""

    take: bool
    columns: dict[str, tuple[str, tuple[int, ...]]] = {}


encode, decode = msgspec.msgpack.Encoder().encode, msgspec.msgpack.Decoder(Header).decode


def send(socket: zmq.Socket[bytes], frames: list[Any]) -> None:
    for frame in frames[:-1]:
        socket.send(frame, SNDMORE, copy=len(frame) < ZERO_COPY_BYTES)
    socket.send(frames[-1], 0, copy=len(frames[-1]) < ZERO_COPY_BYTES)


def receive(socket: zmq.Socket[bytes]) -> list[Any]:
    frames: list[Any] = [socket.recv()]
    while socket.get(RCVMORE):
        frame = socket.recv(copy=False)
        frames.append(frame.buffer)
    return frames


def serve(address: str, keys: list[str]) -> None:
    """Until killed."""
    socket = zmq.Context.instance().socket(zmq.ROUTER)
    if keys:
        socket.curve_server, socket.curve_secretkey = True, keys[0].encode()
    socket.bind(address)
    print(socket.get(zmq.LAST_ENDPOINT).rstrip(b"\0").decode(), flush=True)
    kept: deque[list[Any]] = deque()
    parked: deque[bytes] = deque()
    while True:
        route, raw, *frames = receive(socket)
        if decode(bytes(raw)).take:
            if kept:
                send(socket, [route, *kept.popleft()])
            else:
                parked.append(route)
            continue
        send(socket, [route, b""])
        if parked:
            send(socket, [parked.popleft(), raw, *frames])
        else:
            kept.append([raw, *frames])


class BareClient:
    """One thread's."""

    def __init__(self, address: str, keys: list[str]) -> None:
        self._socket = zmq.Context.instance().socket(zmq.DEALER)
        if keys:
            self._socket.curve_serverkey = keys[1].encode()
            self._socket.curve_publickey, self._socket.curve_secretkey = zmq.curve_keypair()
        self._socket.connect(address)

    def put(self, columns: Mapping[str, Array]) -> None:
        header = Header(False, {name: (array.dtype.str, array.shape) for name, array in columns.items()})
        frames = [array.reshape(-1).view(np.uint8).data for array in columns.values()]
        send(self._socket, [encode(header), *frames])
        receive(self._socket)

    def take(self) -> dict[str, Array]:
        """The oldest put; waits for one."""
        send(self._socket, [encode(Header(True))])
        raw, *frames = receive(self._socket)
        columns = decode(bytes(raw)).columns.items()
        return {
            name: np.frombuffer(frame, dtype).reshape(shape)
            for (name, (dtype, shape)), frame in zip(columns, frames, strict=True)
        }


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2:])
