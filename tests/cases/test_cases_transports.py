"""Cases G01, G03 and G09 over every weight transport."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import Array, TransportContext, WeightPublisher, WeightReceiver, WeightTransport
from headrace.wire import manifest_digest, tensor_info
from headrace_weights.collective.transport import CollectiveSettings, CollectiveTransport
from headrace_weights.disk.transport import DiskSettings, DiskTransport
from headrace_weights.shared_memory.transport import SharedMemoryTransport
from headrace_weights.zmq import ZmqSettings, ZmqTransport
from support.weights import Source, equal, fetch

SHARED: Callable[[], WeightTransport] = lambda: SharedMemoryTransport(SharedMemoryTransport.Settings())  # noqa: E731
TRANSPORTS: dict[str, list[Callable[[], WeightTransport]]] = {
    "shared_memory": [SHARED],
    "zmq": [lambda size=size: ZmqTransport(ZmqSettings(chunk_bytes=size)) for size in (5000, 1 << 17, 1 << 20)],
    "collective": [
        lambda size=size: CollectiveTransport(CollectiveSettings(bucket_bytes=size)) for size in (5000, 1 << 20)
    ],
    "disk": [lambda every=every: DiskTransport(DiskSettings(full_every=every)) for every in (1, 3, 100)],
}
"""Each cut in several ways."""
EVERY = [pytest.param(make, id=f"{name}-{i}") for name, made in TRANSPORTS.items() for i, make in enumerate(made)]
ONE_OF_EACH = [pytest.param(made[0], id=name) for name, made in TRANSPORTS.items()]


@dataclass
class Line:
    """A publisher, and receivers of it."""

    transport: WeightTransport
    directory: Path
    publisher: WeightPublisher

    def receiver(self) -> WeightReceiver:
        context = TransportContext(directory=str(self.directory), name="rollout")
        return self.transport.receiver(context, self.publisher.address())


@pytest.fixture
def line(request: pytest.FixtureRequest) -> Iterator[Line]:
    transport: WeightTransport = request.param()
    with tempfile.TemporaryDirectory(prefix="headrace-") as directory:
        publisher = transport.publisher(TransportContext(directory=directory, name="trainer"))
        yield Line(transport, Path(directory), publisher)
        publisher.close()


def mixed(seed: int) -> dict[str, Array]:
    """Fifty tensors of mixed dtypes and sizes, from nothing to half a MB."""
    generator = np.random.default_rng(seed)
    dtypes = [np.float32, ml_dtypes.bfloat16, np.float16, np.int64, ml_dtypes.float8_e4m3fn]
    shapes = [(0,), (), (1,), (7, 3), (33, 65), (64, 128), (3, 5, 7), (256, 256)]
    return {f"layer.{i}": (10 * generator.standard_normal(shapes[i % 8])).astype(dtypes[i % 5]) for i in range(50)}


def digest(tensors: dict[str, Array]) -> str:
    return manifest_digest(tensor_info(*item) for item in tensors.items())


@pytest.mark.parametrize("line", EVERY, indirect=True)
def test_G01_weights_sent_as_A_B_A_arrive_with_the_digests_of_A_B_A(line: Line) -> None:
    engine = line.receiver()
    published, received = [], []
    for version, seed in enumerate((1, 2, 1)):
        published.append(line.publisher.publish(version, Source(mixed(seed))).digest)
        received.append(digest(fetch(engine, version)))
    assert received == published
    assert received[0] == received[2] != received[1]
    engine.close()


@pytest.mark.parametrize("line", EVERY, indirect=True)
def test_G03_the_result_does_not_depend_on_how_it_is_cut_or_on_the_order(line: Line) -> None:
    sent = mixed(3)
    backwards = dict(reversed(sent.items()))
    engine = line.receiver()
    for version, tensors in enumerate((sent, backwards, sent)):
        line.publisher.publish(version, Source(tensors))
        assert equal(fetch(engine, version), tensors)
    engine.close()


@pytest.mark.parametrize("line", ONE_OF_EACH, indirect=True)
def test_G03_a_slow_reader_gets_the_same_bytes_while_versions_come_and_go(line: Line) -> None:
    live = mixed(0)
    slow, fast = line.receiver(), line.receiver()
    line.publisher.publish(0, Source(live))
    tensors = slow.fetch(slow.manifest(0, deadline=10), deadline=10)
    begun = next(tensors)
    for version in range(1, 5):
        line.publisher.publish(version, Source(mixed(version)))
        assert equal(fetch(fast, version), mixed(version))
        if version > 1:
            line.publisher.retire(version - 1)
    assert equal(dict(chain([begun], tensors)), mixed(0))
    slow.close()
    fast.close()


@pytest.mark.parametrize("line", ONE_OF_EACH, indirect=True)
def test_G09_a_consumer_that_is_versions_late_finds_its_own_until_all_have_gone_on(line: Line) -> None:
    late = line.receiver()
    for version in range(6):
        line.publisher.publish(version, Source(mixed(version)))
    assert equal(fetch(late, 0), mixed(0))
    assert equal(fetch(late, 5), mixed(5))
    late.close()


def test_G09_the_files_of_versions_that_all_have_left_vanish_and_their_number_is_bounded(tmp_path: Path) -> None:
    publisher = DiskTransport(DiskSettings(full_every=3)).publisher(
        TransportContext(directory=str(tmp_path), name="trainer")
    )
    most = 0
    for version in range(20):
        publisher.publish(version, Source(mixed(version)))
        publisher.retire(version - 2)
        most = max(most, len(list(tmp_path.rglob("*.safetensors"))))
    assert most <= 4, "two versions, and the files that they differ from"
    publisher.close()
