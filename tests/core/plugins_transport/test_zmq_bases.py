"""Versions that share a base: it is read once, kept once, and travels to those who ask for it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Array, TransportContext, WeightPublisher, WeightReceiver, WeightSource
from headrace_weights.messages import AskChunk, GiveChunk
from headrace_weights.publisher import ZmqPublisher
from headrace_weights.zmq import ZmqSettings, ZmqTransport


class Source(WeightSource):
    def __init__(self, tensors: dict[str, Array], base: Source | None = None) -> None:
        self._tensors = tensors
        self.base = base
        self.reads = 0

    def tensors(self) -> Iterator[tuple[str, Array]]:
        self.reads += 1
        yield from self._tensors.items()

    def changing(self) -> Iterator[tuple[str, Array]]:
        yield from self._tensors.items()


class Counting(ZmqPublisher):
    served = 0

    def _chunk(self, question: AskChunk, tensor: memoryview) -> GiveChunk:
        self.served += 1
        return super()._chunk(question, tensor)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Counting]:
    publisher = Counting(f"ipc://{tmp_path}/w.sock")
    yield publisher
    publisher.close()


@pytest.fixture
def receiver(publisher: Counting, tmp_path: Path) -> Iterator[WeightReceiver]:
    context = TransportContext(directory=str(tmp_path), name="rollout-0")
    receiver = ZmqTransport(ZmqSettings()).receiver(context, publisher.address())
    yield receiver
    receiver.close()


def fetch(receiver: WeightReceiver, version: int) -> dict[str, Array]:
    return dict(receiver.fetch(receiver.manifest(version, deadline=5), deadline=5))


def test_a_base_is_read_once_and_kept_once_whatever_number_of_versions_have_it(
    publisher: WeightPublisher, receiver: WeightReceiver
) -> None:
    base = Source({"base": np.ones(1 << 20, np.float32)})
    tracemalloc.start()
    try:
        for version in range(4):
            publisher.publish(version, Source({"own": np.full(8, version, np.float32)}, base))
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert base.reads == 1
    assert held < 2 << 22
    publisher.publish(4, Source({"own": np.ones(8, np.float32)}, Source({"base": np.zeros(8, np.float32)})))
    fetched = {version: fetch(receiver, version) for version in (3, 4)}
    assert {version: len(tensors["base"]) for version, tensors in fetched.items()} == {3: 1 << 20, 4: 8}
    assert fetched[3]["own"].tolist() == [3.0] * 8


def test_what_is_not_asked_for_does_not_travel(publisher: Counting, receiver: WeightReceiver) -> None:
    tensors = {name: np.full(100, place, np.float32) for place, name in enumerate("abc")}
    publisher.publish(1, Source(tensors))
    found = dict(receiver.fetch_some(receiver.manifest(1, deadline=5), {"b", "c"}, deadline=5))
    assert publisher.served == 2
    assert {name: tensor[0] for name, tensor in found.items()} == {"b": 1.0, "c": 2.0}
