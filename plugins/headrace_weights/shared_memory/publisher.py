"""The trainer's side: writes versions into segments and hands these out.

Invariant: what two threads touch, the versions and the segments, is touched under the lock.
"""

from __future__ import annotations

import logging
import os
import selectors
import socket
import threading
from contextlib import suppress
from dataclasses import dataclass

import msgspec

from headrace.contract import WeightManifest, WeightPublisher, WeightSource
from headrace.errors import WireError
from headrace.wire import ipc_address
from headrace_weights.shared_memory.host import is_own_user, this_host
from headrace_weights.shared_memory.messages import (
    MESSAGE_BYTES,
    AskManifest,
    GiveManifest,
    GiveSegment,
    Question,
    Refuse,
    Release,
    decode_said,
    encode,
)
from headrace_weights.shared_memory.segments import Segment, Segments, file_of
from headrace_weights.tensors import gather, published_before

logger = logging.getLogger(__name__)

_BACKLOG = 128
SCHEME = "shm://"


@dataclass(frozen=True, slots=True)
class _Version:
    manifest: int
    """A file."""
    manifest_bytes: int
    segment: Segment


class SharedMemoryPublisher(WeightPublisher):
    """Serves from its construction until ``close``, on a socket in the run's private directory."""

    def __init__(self, directory: str, name: str) -> None:
        self._path = ipc_address(directory, f"{name}-weights").removeprefix("ipc://")
        self._versions: dict[int, _Version] = {}
        self._segments = Segments()
        self._lock = threading.Lock()
        self._socket = _listen(self._path)
        self._stop, self._stopped = socket.socketpair()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._socket, selectors.EVENT_READ, self._accept)
        self._selector.register(self._stopped, selectors.EVENT_READ, None)
        self._thread = threading.Thread(target=self._serve, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, source: WeightSource) -> WeightManifest:
        if version in self._versions:
            raise published_before(version)
        with self._lock:
            segment = self._segments.take()
        try:
            manifest = gather(version, source, segment.append)
            segment.finish()
            data = msgspec.msgpack.encode(manifest)
            served = _Version(file_of(data), len(data), segment)
        except BaseException:  # whatever the source raises; raised again
            with self._lock:
                self._segments.retire(segment)
            raise
        with self._lock:
            self._versions[version] = served
        return manifest

    def retire(self, version: int) -> None:
        with self._lock:
            served = self._versions.pop(version, None)
            if served is not None:
                os.close(served.manifest)
                self._segments.retire(served.segment)

    def address(self) -> str:
        return f"{SCHEME}{this_host()}{self._path}"

    def close(self) -> None:
        if self._stop.fileno() < 0:
            return
        self._stop.send(b"\0")
        self._thread.join()
        self._stop.close()
        for version in list(self._versions):
            self.retire(version)
        self._segments.close()

    # ------------------------------------------------------------ the serving thread

    def _serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.fileobj is self._stopped:
                    self._end()
                    return
                key.data(key.fileobj)

    def _end(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._selector.unregister(key.fileobj)
            key.fileobj.close()  # type: ignore[union-attr]  # sockets only
        self._selector.close()
        with suppress(FileNotFoundError):
            os.unlink(self._path)

    def _accept(self, listening: socket.socket) -> None:
        connection, _ = listening.accept()
        if not is_own_user(connection):
            logger.warning("%s: refused a process of another user", self._path)
            connection.close()
            return
        self._selector.register(connection, selectors.EVENT_READ, self._hear)

    def _hear(self, connection: socket.socket) -> None:
        try:
            said = decode_said(connection.recv(MESSAGE_BYTES))
            if isinstance(said, Release):
                with self._lock:
                    self._segments.release(said.segment, connection)
            else:
                self._answer(connection, said)
        except (OSError, msgspec.DecodeError) as error:  # its end, or no receiver: nothing, or nonsense, was said
            logger.info("%s: a receiver is gone: %s", self._path, error)
            self._selector.unregister(connection)
            with self._lock:
                self._segments.gone(connection)
            connection.close()

    def _answer(self, connection: socket.socket, question: Question) -> None:
        """Under the lock until it is sent: a file that is closed meanwhile could be another one by then."""
        with self._lock:
            served = self._versions.get(question.version)
            if served is None:
                reason = f"version {question.version} is not served; versions {sorted(self._versions)[-9:]} are"
                connection.send(encode(Refuse(reason)), socket.MSG_DONTWAIT)
            elif isinstance(question, AskManifest):
                _give(connection, GiveManifest(served.manifest_bytes), served.manifest)
            else:
                segment = served.segment
                self._segments.lease(segment, connection)
                answer = GiveSegment(segment.number, segment.nbytes, self._segments.numbers)
                _give(connection, answer, segment.readable)


def _give(connection: socket.socket, answer: GiveManifest | GiveSegment, file: int) -> None:
    """OSError for a receiver that asks without listening."""
    socket.send_fds(connection, [encode(answer)], [file], socket.MSG_DONTWAIT)


def _listen(path: str) -> socket.socket:
    listening = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    try:
        listening.bind(path)
        listening.listen(_BACKLOG)
    except OSError as error:
        listening.close()
        raise WireError(
            f"cannot listen on {path}: {error.strerror}",
            fix="end the run that uses this directory, or take another one",
        ) from error
    return listening
