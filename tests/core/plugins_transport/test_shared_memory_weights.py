"""Weights in memory that trainer and engines map: nothing is copied, overwritten under a reader, or left behind."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Array, TransportContext, WeightReceiver
from headrace.errors import DeadlineError, RunError, WireError, WiringError
from headrace_weights.shared_memory import host
from headrace_weights.shared_memory.publisher import SharedMemoryPublisher
from headrace_weights.shared_memory.receiver import SharedMemoryReceiver
from headrace_weights.shared_memory.transport import SharedMemoryTransport
from support.weights import Source, equal, fetch, other_process, weights

READER = """
import sys
from headrace_weights.shared_memory.receiver import SharedMemoryReceiver
receiver = SharedMemoryReceiver({address!r})
tensors = dict(receiver.fetch(receiver.manifest(1, deadline=10), deadline=10))
print("holds", flush=True)
sys.stdin.read()
"""
TRAINER = """
import sys
import numpy as np
from headrace.contract import WeightSource
from headrace_weights.shared_memory.publisher import SharedMemoryPublisher

class Source(WeightSource):
    def tensors(self):
        yield "w", np.arange(100000, dtype=np.float32)

publisher = SharedMemoryPublisher({directory!r}, "trainer")
publisher.publish(1, Source())
print(publisher.address(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[SharedMemoryPublisher]:
    tmp_path.chmod(0o700)
    publisher = SharedMemoryPublisher(str(tmp_path), "trainer")
    yield publisher
    publisher.close()
    publisher.close()


@pytest.fixture
def receiver(publisher: SharedMemoryPublisher) -> Iterator[WeightReceiver]:
    receiver = SharedMemoryReceiver(publisher.address())
    yield receiver
    receiver.close()
    receiver.close()


def memory_files() -> int:
    """Of this process, open or mapped."""
    opened = sum("memfd:headrace" in os.readlink(link) for link in Path("/proc/self/fd").iterdir() if link.is_symlink())
    return opened + Path("/proc/self/maps").read_text().count("memfd:headrace")


def segments(publisher: SharedMemoryPublisher) -> tuple[int, ...]:
    return publisher._segments.numbers


def until_unread(publisher: SharedMemoryPublisher) -> None:
    """The serving thread has heard what receivers have said, or that they are gone."""
    end = time.monotonic() + 10
    while any(segment.readers for segment in publisher._segments._all.values()):
        assert time.monotonic() < end, "a segment is still read"
        time.sleep(0.001)  # between looks: the word arrives on another thread


def root(tensor: Array) -> object:
    """What the memory of a view is a part of."""
    base = tensor
    while isinstance(base, np.ndarray) and base.base is not None:
        base = base.base
    return base


def test_the_transport_makes_both_sides_from_a_context(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    transport = SharedMemoryTransport(SharedMemoryTransport.Settings())
    publisher = transport.publisher(TransportContext(directory=str(tmp_path), name="trainer"))
    publisher.publish(0, Source(weights(0)))
    receiver = transport.receiver(TransportContext(directory=str(tmp_path), name="rollout-0"), publisher.address())
    assert equal(fetch(receiver, 0), weights(0))
    receiver.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_what_is_fetched_is_a_view_of_one_mapping(publisher: SharedMemoryPublisher, receiver: WeightReceiver) -> None:
    publisher.publish(1, Source(weights(1)))
    first, second = fetch(receiver, 1).values()
    assert not first.flags.owndata
    assert root(first) is root(second)
    assert first.flags.aligned
    assert first.flags.writeable


def test_a_segment_is_written_to_again_when_its_version_is_retired_and_unread(
    publisher: SharedMemoryPublisher, receiver: WeightReceiver
) -> None:
    for version in range(1, 6):
        publisher.publish(version, Source(weights(version)))
        assert equal(fetch(receiver, version), weights(version))
        until_unread(publisher)
        publisher.retire(version - 1)
    assert len(segments(publisher)) == 2


def test_what_an_engine_still_has_is_never_overwritten(
    publisher: SharedMemoryPublisher, receiver: WeightReceiver
) -> None:
    publisher.publish(1, Source(weights(1)))
    held = fetch(receiver, 1)["second"]
    publisher.retire(1)
    for version in (2, 3, 4):
        publisher.publish(version, Source(weights(version)))
        publisher.retire(version)
    assert held.tobytes() == weights(1)["second"].tobytes()


def test_views_outlive_their_receiver_and_the_publisher(publisher: SharedMemoryPublisher) -> None:
    publisher.publish(1, Source(weights(1)))
    receiver = SharedMemoryReceiver(publisher.address())
    held = fetch(receiver, 1)
    receiver.close()
    until_unread(publisher)
    publisher.retire(1)
    publisher.publish(2, Source(weights(2)))
    assert equal(held, weights(1))
    publisher.close()
    assert equal(held, weights(1))


def test_an_engine_that_writes_to_its_weights_changes_nobody_else_s(
    publisher: SharedMemoryPublisher, receiver: WeightReceiver
) -> None:
    publisher.publish(1, Source(weights(1)))
    mine = fetch(receiver, 1)
    mine["first"][...] = 0
    other = SharedMemoryReceiver(publisher.address())
    assert equal(fetch(other, 1), weights(1))
    other.close()
    del mine
    until_unread(publisher)
    publisher.retire(1)
    publisher.publish(2, Source(weights(2)))
    assert segments(publisher) == (1,)
    assert equal(fetch(receiver, 2), weights(2))


def test_versions_of_other_sizes_follow_one_another(publisher: SharedMemoryPublisher, receiver: WeightReceiver) -> None:
    for version, rows in enumerate((300, 7, 500, 0)):
        publisher.publish(version, Source(weights(version, rows=rows)))
        assert equal(fetch(receiver, version), weights(version, rows=rows))
        until_unread(publisher)
        publisher.retire(version)


def test_a_killed_engine_leaves_memory_that_is_freed_with_its_version(publisher: SharedMemoryPublisher) -> None:
    publisher.publish(1, Source(weights(1)))
    with other_process(READER.format(address=publisher.address())) as (process, said):
        assert said == "holds"
        process.kill()
        process.wait()
        until_unread(publisher)
        publisher.retire(1)
    assert segments(publisher) == ()
    publisher.publish(2, Source(weights(2)))
    receiver = SharedMemoryReceiver(publisher.address())
    assert equal(fetch(receiver, 2), weights(2))
    receiver.close()


def test_a_killed_trainer_leaves_nothing_and_engines_keep_what_they_have(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    before = set(os.listdir("/dev/shm"))
    with other_process(TRAINER.format(directory=str(tmp_path))) as (process, address):
        receiver = SharedMemoryReceiver(address)
        held = fetch(receiver, 1)
        process.kill()
        process.wait()
    assert held["w"][99999] == 99999
    with pytest.raises(DeadlineError, match="no answer from shm://"):
        receiver.manifest(1, deadline=0.1)
    receiver.close()
    assert set(os.listdir("/dev/shm")) <= before
    assert memory_files() > 0
    del held
    assert memory_files() == 0


def test_retired_versions_and_closed_sides_give_their_memory_back(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    publisher = SharedMemoryPublisher(str(tmp_path), "trainer")
    receiver = SharedMemoryReceiver(publisher.address())
    for version in range(4):
        publisher.publish(version, Source(weights(version)))
        fetch(receiver, version)
    until_unread(publisher)
    for version in range(4):
        publisher.retire(version)
    assert len(segments(publisher)) == 1, "one is kept to be written to again"
    publisher.close()
    receiver.close()
    assert memory_files() == 0


def test_a_publisher_on_another_machine_is_refused_with_what_to_use_instead(publisher: SharedMemoryPublisher) -> None:
    address = publisher.address().replace(host.this_host(), "0b5e8c1e-0000-4000-8000-000000000000")
    with pytest.raises(WiringError, match=r'another machine(?s:.*)weights\.use = "zmq"'):
        SharedMemoryReceiver(address)


def test_a_process_of_another_user_gets_nothing(
    publisher: SharedMemoryPublisher, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(1, Source(weights(1)))
    monkeypatch.setattr("headrace_weights.shared_memory.publisher.is_own_user", lambda connection: False)
    with pytest.raises(DeadlineError):
        receiver.manifest(1, deadline=0.1)
    monkeypatch.setattr("headrace_weights.shared_memory.receiver.is_own_user", lambda connection: False)
    with pytest.raises(WireError, match="another user"):
        receiver.manifest(1, deadline=0.1)


def test_memory_that_the_system_has_not_is_a_run_error_and_nothing_is_served(
    publisher: SharedMemoryPublisher, receiver: WeightReceiver, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(RunError, match="no room in shared memory: No space left"):
            publisher.publish(1, Source(weights(1)))
    with pytest.raises(WireError, match="version 1 is not served"):
        receiver.manifest(1, deadline=5)
    publisher.publish(1, Source(weights(1)))
    assert equal(fetch(receiver, 1), weights(1))


def test_nonsense_from_a_peer_costs_it_its_connection_and_nobody_else_s(
    publisher: SharedMemoryPublisher, receiver: WeightReceiver
) -> None:
    publisher.publish(1, Source(weights(1)))
    stranger = SharedMemoryReceiver(publisher.address())._connect()
    stranger.send(b"nonsense")
    assert stranger.recv(100) == b""
    stranger.close()
    assert equal(fetch(receiver, 1), weights(1))


def test_nonsense_from_a_publisher_is_a_wire_error(tmp_path: Path) -> None:
    path = str(tmp_path / "w.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listening:
        listening.bind(path)
        listening.listen()
        receiver = SharedMemoryReceiver(f"shm://{host.this_host()}{path}")
        connection = receiver._connect()
        other, _ = listening.accept()
        other.send(b"nonsense")
        with pytest.raises(WireError, match="an answer that cannot be read"):
            receiver.manifest(1, deadline=5)
        assert connection.fileno() >= 0
        other.close()
        receiver.close()
