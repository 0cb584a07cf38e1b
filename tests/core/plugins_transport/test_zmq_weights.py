from __future__ import annotations

import threading
import time
import tracemalloc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import ml_dtypes
import msgspec
import numpy as np
import pytest
import zmq

from headrace.contract import Array, TransportContext, WeightManifest, WeightReceiver, WeightSource
from headrace.errors import ContractError, DeadlineError, WireError
from headrace_weights.messages import AskChunk, GiveChunk
from headrace_weights.publisher import ZmqPublisher
from headrace_weights.receiver import ZmqReceiver
from headrace_weights.zmq import ZmqSettings, ZmqTransport


class Source(WeightSource):
    def __init__(self, tensors: dict[str, Array]) -> None:
        self._tensors = tensors

    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield from self._tensors.items()


class Lossy(ZmqPublisher):
    """Damages chunks: ``damage`` gets each intact one, counted from 1."""

    damage: Callable[[int, GiveChunk], GiveChunk] = staticmethod(lambda number, chunk: chunk)
    served = 0

    def _chunk(self, question: AskChunk, tensor: memoryview) -> GiveChunk:
        self.served += 1
        return self.damage(self.served, super()._chunk(question, tensor))


def flip(chunk: GiveChunk) -> GiveChunk:
    data = chunk.data.copy()
    data[0] ^= 1
    return GiveChunk(chunk.id, chunk.checksum, data)


def weights(seed: int) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    return {
        "embed": rng.standard_normal((300, 40), dtype=np.float32),
        "half": rng.standard_normal((65, 33), dtype=np.float32).astype(ml_dtypes.bfloat16),
        "eighth": rng.standard_normal(1000, dtype=np.float32).astype(ml_dtypes.float8_e4m3fn),
        "transposed": rng.standard_normal((70, 50), dtype=np.float32).T,
        "empty": np.empty((0, 7), np.float32),
        "scalar": np.array(rng.standard_normal()),
        "counts": rng.integers(0, 100, 17),
    }


@dataclass(frozen=True)
class Line:
    """A publisher and the means to make receivers of it."""

    publisher: Lossy
    directory: Path

    def receiver(self, *, chunk_bytes: int = 1000, window: int = 4) -> WeightReceiver:
        transport = ZmqTransport(ZmqSettings(chunk_bytes=chunk_bytes, window=window))
        context = TransportContext(directory=str(self.directory), name="rollout-0")
        return transport.receiver(context, self.publisher.address())


@pytest.fixture
def line(tmp_path: Path) -> Iterator[Line]:
    publisher = Lossy(f"ipc://{tmp_path}/w.sock")
    yield Line(publisher, tmp_path)
    publisher.close()
    publisher.close()


def fetch(receiver: WeightReceiver, version: int, *, deadline: float = 5) -> dict[str, Array]:
    return dict(receiver.fetch(receiver.manifest(version, deadline=deadline), deadline=deadline))


def equal(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return list(one) == list(other) and all(
        one[n].dtype == other[n].dtype and one[n].shape == other[n].shape and one[n].tobytes() == other[n].tobytes()
        for n in one
    )


def test_the_transport_makes_both_sides_from_a_context(tmp_path: Path) -> None:
    transport = ZmqTransport(ZmqSettings())
    publisher = transport.publisher(TransportContext(directory=str(tmp_path), name="trainer"))
    assert publisher.address() == f"ipc://{tmp_path}/trainer-weights.sock"
    publisher.publish(0, Source(weights(0)))
    receiver = transport.receiver(TransportContext(directory=str(tmp_path), name="rollout-0"), publisher.address())
    assert equal(fetch(receiver, 0), weights(0))
    receiver.close()
    publisher.close()


def test_settings_are_positive() -> None:
    for wrong in ({"chunk_bytes": 0}, {"window": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            ZmqSettings(**wrong)


def test_several_versions_are_served_until_retired(line: Line) -> None:
    for version in range(3):
        line.publisher.publish(version, Source(weights(version)))
    receiver = line.receiver()
    for version in (2, 0, 1):
        assert equal(fetch(receiver, version), weights(version))
    line.publisher.retire(1)
    line.publisher.retire(1)
    with pytest.raises(WireError, match=r"version 1 is not served; versions \[0, 2\] are"):
        receiver.manifest(1, deadline=5)
    receiver.close()


def test_a_version_retired_during_a_fetch_is_an_error_that_names_it(line: Line) -> None:
    line.publisher.publish(4, Source(weights(1)))
    receiver = line.receiver(chunk_bytes=100, window=2)
    tensors = receiver.fetch(receiver.manifest(4, deadline=5), deadline=5)
    next(tensors)
    line.publisher.retire(4)
    with pytest.raises(WireError, match=r"tensor .* of version 4 .* version 4 is not served"):
        list(tensors)
    receiver.close()


def test_retiring_a_version_frees_its_memory(line: Line) -> None:
    size = 32 << 20
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        line.publisher.publish(1, Source({"w": np.ones(size, np.uint8)}))
        receiver = line.receiver(chunk_bytes=8 << 20)
        assert len(fetch(receiver, 1)) == 1
        receiver.close()
        assert tracemalloc.get_traced_memory()[0] - before > size
        line.publisher.retire(1)
        end = time.monotonic() + 5
        while tracemalloc.get_traced_memory()[0] - before > size / 8:
            assert time.monotonic() < end, "the memory never came back"
            time.sleep(0.001)  # between looks: a thread of libzmq frees the memory and tells nobody
    finally:
        tracemalloc.stop()


def test_publishing_a_version_twice_is_a_contract_error(line: Line) -> None:
    line.publisher.publish(1, Source(weights(1)))
    with pytest.raises(ContractError, match="version 1 was published before"):
        line.publisher.publish(1, Source(weights(2)))


def test_a_source_that_gives_a_tensor_twice_is_a_contract_error_and_nothing_is_served(line: Line) -> None:
    class Twice(WeightSource):
        def tensors(self) -> Iterator[tuple[str, Array]]:
            yield "w", np.ones(3)
            yield "w", np.zeros(3)

    with pytest.raises(ContractError, match=r"gave \['w'\] more than once"):
        line.publisher.publish(1, Twice())
    receiver = line.receiver()
    with pytest.raises(WireError, match="version 1 is not served"):
        receiver.manifest(1, deadline=5)
    receiver.close()


def test_a_corrupt_chunk_is_asked_for_again(line: Line) -> None:
    line.publisher.publish(1, Source(weights(1)))
    line.publisher.damage = lambda number, chunk: flip(chunk) if number in (1, 5, 6, 20) else chunk
    receiver = line.receiver()
    assert equal(fetch(receiver, 1), weights(1))
    receiver.close()


@pytest.mark.parametrize("cut", [0, 1, 999])
def test_a_chunk_of_the_wrong_size_is_asked_for_again(line: Line, cut: int) -> None:
    import xxhash

    def shorten(number: int, chunk: GiveChunk) -> GiveChunk:
        if number != 2:
            return chunk
        data = chunk.data[:cut]
        return GiveChunk(chunk.id, xxhash.xxh3_64_intdigest(data.tobytes()), data)

    line.publisher.publish(1, Source(weights(1)))
    line.publisher.damage = shorten
    receiver = line.receiver()
    assert equal(fetch(receiver, 1), weights(1))
    receiver.close()


def test_a_chunk_that_stays_corrupt_is_an_error_that_names_tensor_version_and_place(line: Line) -> None:
    line.publisher.publish(7, Source(weights(1)))
    line.publisher.damage = lambda number, chunk: flip(chunk) if len(chunk.data) == 290 else chunk
    receiver = line.receiver()
    with pytest.raises(
        WireError, match=r"tensor half of version 7 from ipc.*the chunk at byte 4000 was corrupt 4 times"
    ):
        fetch(receiver, 7)
    receiver.close()


def test_bytes_that_contradict_the_manifest_are_never_handed_out(line: Line) -> None:
    import xxhash

    def lie(number: int, chunk: GiveChunk) -> GiveChunk:
        data = flip(chunk).data
        return GiveChunk(chunk.id, xxhash.xxh3_64_intdigest(data.tobytes()), data)

    line.publisher.publish(1, Source({"w": np.arange(3000, dtype=np.float32)}))
    line.publisher.damage = lie
    receiver = line.receiver()
    with pytest.raises(WireError, match=r"tensor w of version 1 .* do not have the manifest's checksum"):
        fetch(receiver, 1)
    receiver.close()


def test_a_lost_chunk_is_asked_for_again(line: Line) -> None:
    line.publisher.publish(1, Source(weights(1)))
    # An answer to a question that was never asked is what a lost answer looks like to the receiver.
    line.publisher.damage = lambda number, chunk: (
        GiveChunk(1 << 40, chunk.checksum, chunk.data) if number == 3 else chunk
    )
    receiver = line.receiver()
    assert equal(fetch(receiver, 1, deadline=0.8), weights(1))
    receiver.close()


def test_a_publisher_that_is_gone_is_a_deadline_error_in_time(line: Line) -> None:
    line.publisher.publish(5, Source(weights(1)))
    receiver = line.receiver(chunk_bytes=100, window=1)
    tensors = receiver.fetch(receiver.manifest(5, deadline=5), deadline=0.2)
    next(tensors)
    line.publisher.close()
    start = time.monotonic()
    with pytest.raises(DeadlineError, match="awaiting tensor half of version 5"):
        list(tensors)
    assert time.monotonic() - start < 2
    with pytest.raises(DeadlineError, match="awaiting the manifest of version 5"):
        receiver.manifest(5, deadline=0.1)
    receiver.close()


def test_a_publisher_that_comes_back_is_fetched_from_to_the_end(line: Line) -> None:
    line.publisher.publish(5, Source(weights(1)))
    receiver = line.receiver(chunk_bytes=100, window=3)
    manifest = receiver.manifest(5, deadline=5)
    tensors = receiver.fetch(manifest, deadline=2)
    received = dict([next(tensors)])
    line.publisher.close()
    again = ZmqPublisher(line.publisher.address())
    again.publish(5, Source(weights(1)))
    received.update(tensors)
    assert equal(received, weights(1))
    again.close()
    receiver.close()


def test_the_deadline_is_without_progress_and_not_of_the_whole_fetch(line: Line) -> None:
    line.publisher.publish(1, Source(weights(1)))
    slow = threading.Event()

    def dawdle(number: int, chunk: GiveChunk) -> GiveChunk:
        slow.wait(0.02)
        return chunk

    line.publisher.damage = dawdle
    receiver = line.receiver(chunk_bytes=2000, window=1)
    start = time.monotonic()
    assert equal(fetch(receiver, 1, deadline=0.3), weights(1))
    assert time.monotonic() - start > 0.3
    receiver.close()


def test_a_slow_consumer_of_tensors_does_not_run_into_the_deadline(line: Line) -> None:
    line.publisher.publish(1, Source(weights(1)))
    receiver = line.receiver()
    tensors = receiver.fetch(receiver.manifest(1, deadline=5), deadline=0.1)
    received = {}
    for name, tensor in tensors:
        received[name] = tensor
        if len(received) == 1:
            threading.Event().wait(0.2)
    assert equal(received, weights(1))
    receiver.close()


def test_a_fetch_left_unfinished_does_not_disturb_the_next_one(line: Line) -> None:
    for version in (1, 2):
        line.publisher.publish(version, Source(weights(version)))
    receiver = line.receiver(window=8)
    unfinished = receiver.fetch(receiver.manifest(1, deadline=5), deadline=5)
    next(unfinished)
    assert equal(fetch(receiver, 2), weights(2))
    receiver.close()


def test_several_receivers_fetch_at_once_while_versions_come_and_go(line: Line) -> None:
    line.publisher.publish(0, Source(weights(0)))
    receivers = [line.receiver(chunk_bytes=500 * (i + 1), window=i + 1) for i in range(4)]
    with ThreadPoolExecutor(4) as pool:
        running = [pool.submit(fetch, receiver, 0) for receiver in receivers]
        for version in range(1, 20):
            line.publisher.publish(version, Source({"w": np.full(1000, version)}))
            line.publisher.retire(version - 1 if version > 1 else -1)
        assert all(equal(future.result(), weights(0)) for future in running)
    for receiver in receivers:
        receiver.close()


def test_a_receiver_that_leaves_in_the_middle_leaves_the_publisher_serving(line: Line) -> None:
    line.publisher.publish(0, Source(weights(0)))
    for _ in range(5):
        leaving = line.receiver(chunk_bytes=64, window=50)
        next(leaving.fetch(leaving.manifest(0, deadline=5), deadline=5))
        leaving.close()
    receiver = line.receiver()
    assert equal(fetch(receiver, 0), weights(0))
    receiver.close()


def test_questions_outside_a_version_are_refused_and_garbage_is_counted(line: Line) -> None:
    line.publisher.publish(0, Source({"w": np.ones(100, np.uint8)}))
    wrong = [(1, 0, 1), (-1, 0, 1), (0, -1, 1), (0, 0, 0), (0, 0, 101), (0, 99, 2), (0, 1 << 60, 1)]
    with zmq.Context() as context, context.socket(zmq.DEALER) as peer:
        peer.linger = 0
        peer.connect(line.publisher.address())
        for tensor, offset, size in wrong:
            peer.send(msgspec.msgpack.encode(AskChunk(1, 0, tensor, offset, size)))
            assert peer.poll(5000)
            assert msgspec.msgpack.decode(peer.recv())[0] == 4
        for garbage in (b"", b"x", b"\x91" * 10_000, msgspec.msgpack.encode([7, 1])):
            peer.send_multipart([garbage, b"more"])
        peer.send(msgspec.msgpack.encode(AskChunk(1, 0, 0, 0, 100)))
        assert peer.poll(5000)
        assert msgspec.msgpack.decode(peer.recv())[0] == 3
    assert sum(line.publisher.refused.values()) == 4


def test_a_manifest_that_contradicts_itself_is_refused(line: Line, monkeypatch: pytest.MonkeyPatch) -> None:
    line.publisher.publish(0, Source(weights(0)))
    version = line.publisher._versions[0]
    lying = WeightManifest(version=0, tensors=version.manifest.tensors[1:], nbytes=0, digest=version.manifest.digest)
    line.publisher._versions[0] = type(version)(manifest=lying, tensors=version.tensors)
    receiver = line.receiver()
    with pytest.raises(WireError, match="contradicts its own digest"):
        receiver.manifest(0, deadline=5)
    receiver.close()


def test_an_idle_publisher_uses_no_processor_time(line: Line) -> None:
    line.publisher.publish(0, Source(weights(0)))
    before = time.process_time()
    time.sleep(0.3)  # the idle time that is measured
    assert time.process_time() - before < 0.02


def test_the_receiver_knows_no_dtype_that_numpy_does_not(line: Line) -> None:
    manifest = line.publisher.publish(0, Source({"w": np.ones(3)}))
    info = manifest.tensors[0]
    alien = WeightManifest(
        version=0, tensors=(type(info)(name="w", dtype="float3", shape=(3,), checksum=""),), nbytes=0, digest=""
    )
    receiver = ZmqReceiver(line.publisher.address(), chunk_bytes=10, window=1)
    with pytest.raises(WireError, match="dtype 'float3', which this node does not know"):
        list(receiver.fetch(alien, deadline=1))
    receiver.close()
