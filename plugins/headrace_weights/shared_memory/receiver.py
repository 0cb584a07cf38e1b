"""An engine's side: maps a version's segment and hands out views.

Invariant: a segment is released only when no array that was handed out of it is alive. Views are private: who writes to
one gets a copy of the page, and nobody else sees it.
"""

from __future__ import annotations

import mmap
import os
import socket
import time
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import suppress

import msgspec
import numpy as np

from headrace.contract import Array, WeightManifest, WeightReceiver
from headrace.errors import DeadlineError, WireError, WiringError
from headrace_weights.shared_memory.host import is_own_user, this_host
from headrace_weights.shared_memory.messages import (
    MESSAGE_BYTES,
    Answer,
    AskManifest,
    AskSegment,
    GiveManifest,
    GiveSegment,
    Question,
    Refuse,
    Release,
    decode_answer,
    encode,
)
from headrace_weights.shared_memory.publisher import SCHEME
from headrace_weights.tensors import checked_manifest, places, typed

_RETRY_SECONDS = 0.02
"""Between two attempts to connect."""


class SharedMemoryReceiver(WeightReceiver):
    """Of one publisher. One fetch at a time; arrays stay valid after ``close``, and after the publisher's end."""

    def __init__(self, address: str) -> None:
        host, slash, path = address.removeprefix(SCHEME).partition("/")
        if host != this_host():
            raise WiringError(
                f"the weights of {address} are in another machine's memory; shared memory reaches one machine",
                fix='set weights.use = "zmq", or "disk" with a folder that both machines have',
            )
        self._address = address
        self._path = slash + path
        self._connection: socket.socket | None = None
        self._mapped: dict[int, mmap.mmap] = {}
        """By the segment's number: mapping anew costs more than reading the checksums."""
        self._unsaid: deque[int] = deque()
        """Segments whose release the publisher could not yet be told."""

    def manifest(self, version: int, *, deadline: float) -> WeightManifest:
        question = AskManifest(version)
        answer, file = self._ask(question, deadline, f"the manifest of version {version}")
        try:
            if not isinstance(answer, GiveManifest):
                raise WireError(f"{self._address} answered with a segment where a manifest was asked for")
            manifest = msgspec.msgpack.decode(os.pread(file, answer.nbytes, 0), type=WeightManifest)
        finally:
            os.close(file)
        return checked_manifest(manifest, version, self._address)

    def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
        segment = self._segment(manifest, deadline, fresh=False)
        for info, start, stop in places(manifest):
            what = f"tensor {info.name} of version {manifest.version} from {self._address}"
            try:
                tensor = typed(info, segment[start:stop], what)
            except WireError:  # an engine may have written to a page of an earlier version: then that is mapped here
                segment = self._segment(manifest, deadline, fresh=True)
                tensor = typed(info, segment[start:stop], what)
            yield info.name, tensor

    def close(self) -> None:
        self._mapped.clear()
        self._disconnect()

    # ------------------------------------------------------------ segments

    def _segment(self, manifest: WeightManifest, deadline: float, *, fresh: bool) -> Array:
        """The version's bytes, leased until neither this array nor a view of it is alive. ``fresh``: mapped anew."""
        question = AskSegment(manifest.version)
        answer, file = self._ask(question, deadline, f"the values of version {manifest.version}")
        try:
            if not isinstance(answer, GiveSegment):
                raise WireError(f"{self._address} answered with a manifest where values were asked for")
            for gone in self._mapped.keys() - set(answer.kept):
                del self._mapped[gone]
            mapped = None if fresh else self._mapped.get(answer.segment)
            if mapped is None or len(mapped) != max(answer.nbytes, 1):
                mapped = self._mapped[answer.segment] = _map(file, answer.nbytes)
        finally:
            os.close(file)
        segment: Array = np.frombuffer(mapped, np.uint8, count=answer.nbytes)
        weakref.finalize(segment, self._release, answer.segment, self._connection).atexit = False
        return segment

    def _release(self, segment: int, connection: socket.socket | None) -> None:
        """On whatever thread the last view ends. A publisher that the segment is not of any more need not know."""
        if connection is self._connection:
            self._unsaid.append(segment)
            self._say_released()

    def _say_released(self) -> None:
        connection = self._connection
        with suppress(OSError, IndexError):  # no room now: with the next question; another thread was faster
            while connection is not None and self._unsaid:
                connection.send(encode(Release(self._unsaid[0])), socket.MSG_DONTWAIT)
                self._unsaid.popleft()

    # ------------------------------------------------------------ questions

    def _ask(self, question: Question, deadline: float, what: str) -> tuple[Answer, int]:
        """The answer and its file, which is the caller's to close. WireError when it is a refusal."""
        end = time.monotonic() + deadline
        while (left := end - time.monotonic()) > 0:
            try:
                self._connect().settimeout(left)
                self._say_released()
                answer, file = self._exchange(question)
            except OSError:  # nobody listens, yet or any more
                self._disconnect()
                time.sleep(min(_RETRY_SECONDS, left))
                continue
            if isinstance(answer, Refuse):
                raise WireError(f"{what} from {self._address}: {answer.reason}")
            return answer, file
        raise DeadlineError(
            f"no answer from {self._address} in {deadline:g} s, awaiting {what}",
            fix="see whether the trainer's node lives and what its log says",
        )

    def _exchange(self, question: Question) -> tuple[Answer, int]:
        """OSError when the connection does not last until the answer; -1 for one without a file."""
        assert self._connection is not None
        self._connection.send(encode(question))
        data, files, _, _ = socket.recv_fds(self._connection, MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            raise ConnectionResetError
        try:
            return decode_answer(data), files[0] if files else -1
        except msgspec.DecodeError as error:
            for file in files:
                os.close(file)
            raise WireError(f"{self._address} gave an answer that cannot be read: {error}") from error

    def _connect(self) -> socket.socket:
        if self._connection is None:
            connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            try:
                connection.connect(self._path)
                if not is_own_user(connection):
                    raise WireError(f"{self._address} is served by another user's process")
            except BaseException:
                connection.close()
                raise
            self._connection = connection
        return self._connection

    def _disconnect(self) -> None:
        """Leases end with their connection: the publisher will not write to what may still be read."""
        connection, self._connection = self._connection, None
        self._unsaid.clear()
        self._mapped.clear()
        if connection is not None:
            connection.close()


def _map(file: int, nbytes: int) -> mmap.mmap:
    flags, protection = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    if not nbytes:  # of a version whose tensors are all empty; nothing of it is a file's
        return mmap.mmap(-1, 1, flags=flags, prot=protection)
    return mmap.mmap(file, nbytes, flags=flags, prot=protection)
