"""An engine's side: pulls a version chunk by chunk, with a window of questions on the way.

Invariant: a tensor is handed out only when its bytes have the manifest's checksum. Every question may be asked
again without harm, which is how lost and corrupt chunks, and a publisher's connection that broke, are made good.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from typing import TypeVar

import numpy as np
import xxhash
import zmq

from headrace.contract import Array, TensorInfo, WeightManifest, WeightReceiver
from headrace.errors import DeadlineError, WireError
from headrace.wire import DEFAULT_LIMITS, Keys, RefusedError, connect_socket, decode, encode
from headrace_weights.messages import (
    Answer,
    AskChunk,
    AskManifest,
    AskRound,
    GiveChunk,
    GiveManifest,
    Given,
    Question,
    Refuse,
)
from headrace_weights.tensors import checked_manifest, nbytes_of, typed

logger = logging.getLogger(__name__)

Q = TypeVar("Q", AskChunk, AskManifest, AskRound)

_ASKS = 4
"""A question is asked this often, spread over its deadline; a chunk may be corrupt this often."""


class ZmqReceiver(WeightReceiver):
    """Of one publisher. One fetch at a time; a fetch may be left unfinished."""

    def __init__(self, address: str, *, chunk_bytes: int, window: int, keys: Keys | None = None) -> None:
        self._address = address
        self._keys = keys
        self._chunk_bytes = chunk_bytes
        self._window = window
        self._ids = itertools.count(1)
        self._socket = self._connect()

    def manifest(self, version: int, *, deadline: float) -> WeightManifest:
        question = AskManifest(next(self._ids), version)
        self._ask(question)
        answer = self._await({question.id: question}, deadline, f"the manifest of version {version}")
        if not isinstance(answer, GiveManifest):
            raise WireError(f"{self._address} gave something else where a manifest was asked for")
        return checked_manifest(answer.manifest, version, self._address)

    def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
        return self.fetch_some(manifest, {info.name for info in manifest.tensors}, deadline=deadline)

    def fetch_some(
        self, manifest: WeightManifest, names: Collection[str], *, deadline: float
    ) -> Iterator[tuple[str, Array]]:
        wanted = [(number, info) for number, info in enumerate(manifest.tensors) if info.name in names]
        tensors = {number: _Incoming(info) for number, info in wanted}
        questions = self._questions(manifest.version, tensors)
        pending: dict[int, AskChunk] = {}
        corrupt: dict[tuple[int, int], int] = {}
        for incoming in tensors.values():
            what = f"tensor {incoming.info.name} of version {manifest.version}"
            while incoming.missing:
                for question in itertools.islice(questions, self._window - len(pending)):
                    pending[question.id] = question
                    self._ask(question)
                answer = self._await(pending, deadline, what)
                question = pending.pop(answer.id)
                if not self._accept(answer, question, tensors[question.tensor]):
                    again = self._again(question, corrupt, what)
                    pending[again.id] = again
                    self._ask(again)
            yield incoming.info.name, incoming.finish(f"{what} from {self._address}")

    def close(self) -> None:
        self._socket.close(linger=0)

    def _questions(self, version: int, tensors: Mapping[int, _Incoming]) -> Iterator[AskChunk]:
        for number, incoming in tensors.items():
            for offset in range(0, incoming.nbytes, self._chunk_bytes):
                size = min(self._chunk_bytes, incoming.nbytes - offset)
                yield AskChunk(next(self._ids), version, number, offset, size)

    def _accept(self, answer: Given, question: AskChunk, incoming: _Incoming) -> bool:
        """Whether the answer is the chunk that was asked for, intact."""
        if not isinstance(answer, GiveChunk) or answer.data.dtype != np.uint8 or answer.data.shape != (question.size,):
            return False
        if xxhash.xxh3_64_intdigest(answer.data.data) != answer.checksum:
            return False
        incoming.add(question.offset, answer.data)
        return True

    def _again(self, question: AskChunk, corrupt: dict[tuple[int, int], int], what: str) -> AskChunk:
        place = (question.tensor, question.offset)
        corrupt[place] = corrupt.get(place, 0) + 1
        if corrupt[place] >= _ASKS:
            raise WireError(
                f"{what} from {self._address}: the chunk at byte {question.offset} was corrupt {_ASKS} times",
                fix="check the memory of the trainer's host and the network between the hosts",
            )
        logger.warning("%s: the chunk at byte %d was corrupt; asking again", what, question.offset)
        return AskChunk(next(self._ids), question.version, question.tensor, question.offset, question.size)

    def _connect(self) -> zmq.Socket[bytes]:
        return connect_socket(zmq.Context.instance(), self._address, keys=self._keys, limits=DEFAULT_LIMITS)

    def _ask(self, question: Question) -> None:
        with suppress(zmq.Again):  # it counts as lost and is asked again
            self._socket.send_multipart(encode(question), zmq.NOBLOCK)

    def _ask_again(self, questions: Iterable[Question]) -> None:
        """Over a new connection: libzmq gives one up for good when a handshake fails, and does not always say so."""
        self._socket.close(linger=0)
        self._socket = self._connect()
        for question in questions:
            self._ask(question)

    def _await(self, pending: dict[int, Q], deadline: float, what: str) -> Given:
        """The next answer to a pending question. WireError when it is a refusal, DeadlineError without one."""
        end = time.monotonic() + deadline
        while (left := end - time.monotonic()) > 0:
            answer = self._receive(min(left, deadline / _ASKS))
            if answer is None:
                self._ask_again(pending.values())
            elif answer.id in pending:  # others belong to a fetch left unfinished, or were asked for twice
                if isinstance(answer, Refuse):
                    raise WireError(f"{what} from {self._address}: {answer.reason}")
                return answer
        raise DeadlineError(
            f"no answer from {self._address} in {deadline:g} s, awaiting {what}",
            fix="see whether the trainer's node lives and what its log says",
        )

    def _receive(self, seconds: float) -> Answer | None:
        """None when nothing arrived in time."""
        if not self._socket.poll(round(seconds * 1000) + 1, zmq.POLLIN):
            return None
        frames = self._socket.recv_multipart(copy=False)
        try:
            answer: Answer = decode([frame.buffer for frame in frames], Answer)  # type: ignore[arg-type]  # a union
        except RefusedError as refusal:
            logger.warning("%s: a malformed answer, which counts as lost: %s", self._address, refusal.message)
            return None
        return answer


class _Incoming:
    """A tensor on its way. One that fits in a chunk keeps that message's memory, others are put together."""

    def __init__(self, info: TensorInfo) -> None:
        self.info = info
        self.nbytes = nbytes_of(info)
        self.missing = self.nbytes
        self._data: Array | None = None

    def add(self, offset: int, chunk: Array) -> None:
        """Each byte arrives once: a question leaves the pending ones with its first intact answer."""
        if len(chunk) == self.nbytes:
            self._data = chunk
        else:
            if self._data is None:
                self._data = np.empty(self.nbytes, np.uint8)
            self._data[offset : offset + len(chunk)] = chunk
        self.missing -= len(chunk)

    def finish(self, what: str) -> Array:
        """The tensor, verified; its memory is the caller's."""
        data, self._data = self._data, None
        if data is None:
            data = np.empty(0, np.uint8)
        return typed(self.info, data, what)
