"""Every weight transport keeps the rules of its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.contract import TransportContext, WeightPublisher, WeightReceiver, WeightTransport
from headrace.testing import FakeWeightTransport
from headrace.testing.suites import WeightTransportContract
from headrace.testing.transport import FakeReceiver
from headrace.wire import ipc_address
from headrace_weights.messages import AskChunk, GiveChunk
from headrace_weights.publisher import ZmqPublisher
from headrace_weights.zmq import ZmqTransport

IN_CHUNKS = ZmqTransport.Settings(chunk_bytes=1000)


class TestZmqTransport(WeightTransportContract):
    @pytest.fixture
    def plugin(self) -> WeightTransport:
        return ZmqTransport(IN_CHUNKS)

    @pytest.fixture
    def corrupting(self) -> WeightTransport:
        class Flipping(ZmqPublisher):
            def _chunk(self, question: AskChunk, tensor: memoryview) -> GiveChunk:
                chunk = super()._chunk(question, tensor)
                return GiveChunk(chunk.id, chunk.checksum, chunk.data ^ 1)

        class Corrupting(ZmqTransport):
            def publisher(self, context: TransportContext) -> WeightPublisher:
                return Flipping(ipc_address(context.directory, f"{context.name}-weights"))

        return Corrupting(IN_CHUNKS)


class TestFakeWeightTransport(WeightTransportContract):
    @pytest.fixture
    def plugin(self) -> WeightTransport:
        return FakeWeightTransport(FakeWeightTransport.Settings())

    @pytest.fixture
    def corrupting(self) -> WeightTransport:
        class Flipping(FakeReceiver):
            def _received(self, data: bytearray) -> bytearray:
                return bytearray(byte ^ 1 for byte in data)

        class Corrupting(FakeWeightTransport):
            def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
                return Flipping(Path(address), self.settings)

        return Corrupting(FakeWeightTransport.Settings())
