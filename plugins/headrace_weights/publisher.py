"""The trainer's side: keeps published versions in host memory and answers receivers' questions.

Invariant: the socket is used by one thread, which only hands out views of arrays that never change; a version's
memory is free once it is retired and what was already handed to the socket has left.
"""

from __future__ import annotations

import logging
import threading
import weakref
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash
import zmq

from headrace.contract import Array, TensorInfo, WeightManifest, WeightPublisher, WeightSource
from headrace.errors import WireError
from headrace.wire import (
    DEFAULT_LIMITS,
    Gate,
    Keys,
    RefusedError,
    array_bytes,
    bind_socket,
    bound_address,
    close_context,
    decode,
    encode,
    open_context,
    tensor_info,
)
from headrace_weights.messages import (
    Answer,
    AskChunk,
    AskManifest,
    AskRound,
    GiveChunk,
    GiveManifest,
    Question,
    Refuse,
)
from headrace_weights.tensors import manifest_of, published_before

logger = logging.getLogger(__name__)

_CONTROL = "inproc://stop"


@dataclass(frozen=True, slots=True, kw_only=True)
class PublishedVersion:
    """In host memory."""

    manifest: WeightManifest
    tensors: tuple[memoryview, ...]
    """Bytes, in the manifest's order."""


@dataclass(frozen=True, slots=True)
class _Copies:
    """Of tensors; ``data``: their bytes."""

    infos: tuple[TensorInfo, ...]
    data: tuple[memoryview, ...]

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Array]]) -> _Copies:
        copies = [(name, np.array(tensor, order="C", copy=True)) for name, tensor in tensors]
        return cls(
            tuple(tensor_info(name, copy) for name, copy in copies), tuple(array_bytes(copy) for _, copy in copies)
        )

    def __add__(self, other: _Copies) -> _Copies:
        return _Copies(self.infos + other.infos, self.data + other.data)


class ZmqPublisher(WeightPublisher):
    """Serves from its construction until ``close``. ``refused`` counts questions and peers turned away, by
    reason."""

    def __init__(self, address: str, *, keys: Keys | None = None) -> None:
        self.refused: Counter[str] = Counter()
        self._versions: dict[int, PublishedVersion] = {}  # the serving thread only looks up, which is atomic
        self._base: tuple[weakref.ref[WeightSource], _Copies] | None = None
        """The base that the newest version has, and its copies, which versions share."""
        self._context = open_context()
        self._gate = None if keys is None else Gate(self._context, keys, self.refused)
        try:
            self._socket = bind_socket(self._context, address, keys=keys, limits=DEFAULT_LIMITS)
        except WireError:
            self._close_gate()
            close_context(self._context)
            raise
        self._address = bound_address(self._socket)
        self._stopped = self._context.socket(zmq.PAIR)
        self._stopped.bind(_CONTROL)
        self._stop = self._context.socket(zmq.PAIR)
        self._stop.connect(_CONTROL)
        self._thread = threading.Thread(target=self._serve, name="weight-publisher", daemon=True)
        self._thread.start()

    def publish(self, version: int, source: WeightSource) -> WeightManifest:
        if version in self._versions:
            raise published_before(version)
        copies = self._copied_base(source.base) + _Copies.of(source.changing())
        manifest = manifest_of(version, copies.infos)
        self._versions[version] = PublishedVersion(manifest=manifest, tensors=copies.data)
        return manifest

    def _copied_base(self, base: WeightSource | None) -> _Copies:
        """Copied once for as long as it is the same object."""
        if base is None:
            self._base = None
            return _Copies((), ())
        if self._base is None or self._base[0]() is not base:
            self._base = (weakref.ref(base), _Copies.of(base.tensors()))
        return self._base[1]

    def retire(self, version: int) -> None:
        self._versions.pop(version, None)

    def address(self) -> str:
        return self._address

    def close(self) -> None:
        if not self._stop.closed:
            self._stop.send(b"")
            self._thread.join()
            self._stop.close()
            close_context(self._context)
            self._versions.clear()

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._stopped, zmq.POLLIN)
        if self._gate is not None:
            poller.register(self._gate.socket, zmq.POLLIN)
        while self._stopped not in (ready := dict(poller.poll())):
            if self._socket in ready:
                self._serve_one()
            if self._gate is not None and self._gate.socket in ready:
                self._gate.answer()
        self._close_gate()
        self._socket.close(linger=0)
        self._stopped.close(linger=0)

    def _close_gate(self) -> None:
        if self._gate is not None:
            self._gate.close()

    def _serve_one(self) -> None:
        route, *frames = self._socket.recv_multipart(copy=False)
        try:
            question: Question = decode([frame.buffer for frame in frames], Question)  # type: ignore[arg-type]  # a union
        except RefusedError as refusal:
            self.refused[refusal.reason] += 1
            logger.warning("%s: refused a question: %s", self._address, refusal.message)
            return
        self._socket.send_multipart([route, *encode(self._answer(question))], copy=False)

    def _answer(self, question: Question) -> Answer:
        version = self._versions.get(question.version)
        if version is None:
            served = sorted(self._versions)
            return Refuse(question.id, f"version {question.version} is not served; versions {served} are")
        if isinstance(question, AskManifest):
            return GiveManifest(question.id, version.manifest)
        if isinstance(question, AskRound):
            return self._join(question, version)
        if not 0 <= question.tensor < len(version.tensors):
            return Refuse(question.id, f"version {question.version} has no tensor number {question.tensor}")
        tensor = version.tensors[question.tensor]
        if question.offset < 0 or question.size < 1 or question.offset + question.size > tensor.nbytes:
            return Refuse(question.id, f"a chunk outside the {tensor.nbytes} bytes of tensor {question.tensor}")
        return self._chunk(question, tensor)

    def _join(self, question: AskRound, version: PublishedVersion) -> Answer:
        return Refuse(question.id, "this publisher sends to no groups; trainer and engine have other transports")

    def _chunk(self, question: AskChunk, tensor: memoryview) -> GiveChunk:
        data: Array = np.frombuffer(tensor[question.offset : question.offset + question.size], np.uint8)
        return GiveChunk(question.id, xxhash.xxh3_64_intdigest(data.data), data)
