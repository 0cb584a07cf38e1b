"""Every weight transport keeps the rules of its role."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import (
    Array,
    TensorInfo,
    TransportContext,
    WeightManifest,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)
from headrace.registry import PluginSpec, build
from headrace.testing import FakeWeightTransport
from headrace.testing.suites import WeightTransportContract
from headrace.testing.transport import FakeReceiver
from headrace.wire import ipc_address
from headrace_weights.collective.group import Meeting
from headrace_weights.collective.publisher import CollectivePublisher, Round
from headrace_weights.collective.transport import CollectiveTransport
from headrace_weights.disk.publisher import DiskPublisher
from headrace_weights.disk.transport import DiskTransport
from headrace_weights.messages import AskChunk, GiveChunk
from headrace_weights.publisher import ZmqPublisher
from headrace_weights.shared_memory.publisher import SharedMemoryPublisher
from headrace_weights.shared_memory.segments import Segment
from headrace_weights.shared_memory.transport import SharedMemoryTransport
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


class TestSharedMemoryTransport(WeightTransportContract):
    @pytest.fixture
    def plugin(self) -> WeightTransport:
        return SharedMemoryTransport(SharedMemoryTransport.Settings())

    @pytest.fixture
    def corrupting(self) -> WeightTransport:
        class Flipping(Segment):
            def append(self, name: str, tensor: Array) -> TensorInfo:
                info = super().append(name, tensor)
                if tensor.nbytes:
                    os.pwrite(self.file, bytes([os.pread(self.file, 1, self.nbytes - 1)[0] ^ 1]), self.nbytes - 1)
                return info

        class Publisher(SharedMemoryPublisher):
            def publish(self, version: int, source: WeightSource) -> WeightManifest:
                segment = self._segments.take()
                self._segments._spare = Flipping(segment.number, segment.file, segment.readable)
                return super().publish(version, source)

        class Corrupting(SharedMemoryTransport):
            def publisher(self, context: TransportContext) -> WeightPublisher:
                return Publisher(context.directory, context.name)

        return Corrupting(SharedMemoryTransport.Settings())


class TestDiskTransportInAFolderOfTheJob(WeightTransportContract):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> WeightTransport:
        return DiskTransport(DiskTransport.Settings(path=str(tmp_path), full_every=3))

    @pytest.fixture
    def directory(self, tmp_path_factory: pytest.TempPathFactory) -> str:
        return str(tmp_path_factory.mktemp("job"))


class TestDiskTransport(WeightTransportContract):
    @pytest.fixture
    def plugin(self) -> WeightTransport:
        return DiskTransport(DiskTransport.Settings(full_every=2))

    @pytest.fixture
    def corrupting(self) -> WeightTransport:
        class Publisher(DiskPublisher):
            def publish(self, version: int, source: WeightSource) -> WeightManifest:
                manifest = super().publish(version, source)
                with (self._home / self._served[version].file).open("r+b") as file:
                    last = file.seek(-1, os.SEEK_END)
                    (byte,) = file.read(1)
                    file.seek(last)
                    file.write(bytes([byte ^ 1]))
                return manifest

        class Corrupting(DiskTransport):
            def publisher(self, context: TransportContext) -> WeightPublisher:
                return Publisher(context.directory, full_every=2)

        return Corrupting(DiskTransport.Settings())


class TestCollectiveTransport(WeightTransportContract):
    @pytest.fixture
    def plugin(self) -> WeightTransport:
        return CollectiveTransport(CollectiveTransport.Settings(bucket_bytes=1000))

    @pytest.fixture
    def corrupting(self) -> WeightTransport:
        class Publisher(CollectivePublisher):
            def _send(self, closed: Round) -> None:
                flipped = tuple((np.frombuffer(data, np.uint8) ^ 1).data for data in closed.version.tensors)
                super()._send(replace(closed, version=replace(closed.version, tensors=flipped)))

        class Corrupting(CollectiveTransport):
            def publisher(self, context: TransportContext) -> WeightPublisher:
                meeting = Meeting(f"{context.directory}/groups", serve=True, seconds=20)
                return Publisher(ipc_address(context.directory, "weights"), meeting, bucket_bytes=1000)

        return Corrupting(CollectiveTransport.Settings(bucket_bytes=1000))


class TestTransportOfTheGuide(WeightTransportContract):
    @pytest.fixture
    def plugin(self, tmp_path: Path) -> WeightTransport:
        guide = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text()
        (text,) = re.findall(r"^```python\n# folder\.py\n(.*?)^```$", guide, re.DOTALL | re.MULTILINE)
        (tmp_path / "folder.py").write_text(text)
        made = build(PluginSpec(role="weight_transport", use="./folder.py:Folder", directory=str(tmp_path)))
        assert isinstance(made, WeightTransport)
        return made

    @pytest.fixture
    def corrupting(self, plugin: WeightTransport) -> WeightTransport:
        class Damaging(type(plugin)):  # type: ignore[misc]  # the class is that of a file
            def publisher(self, context: TransportContext) -> WeightPublisher:
                publisher = super().publisher(context)
                publish = publisher.publish

                def damaged(version: int, source: WeightSource) -> WeightManifest:
                    manifest = publish(version, source)
                    file = Path(publisher.address()) / str(version) / "0"
                    file.write_bytes(bytes(byte ^ 1 for byte in file.read_bytes()))
                    return manifest

                publisher.publish = damaged
                return publisher

        return Damaging(plugin.settings)


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
