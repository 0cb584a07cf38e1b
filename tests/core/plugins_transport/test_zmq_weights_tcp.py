"""Weights over tcp: holders of the run's keys get them, nobody else gets a byte."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from headrace.contract import Array, TransportContext, WeightReceiver, WeightSource
from headrace.errors import DeadlineError, WireError
from headrace.wire import Keys, encode
from headrace_weights.messages import AskManifest
from headrace_weights.publisher import ZmqPublisher
from headrace_weights.zmq import ZmqSettings, ZmqTransport

KEYS = Keys.generate()
WEIGHTS = {"layer": np.arange(5000, dtype=np.float32).reshape(50, 100), "bias": np.ones(3, np.float32)}


class Source(WeightSource):
    def tensors(self) -> Iterator[tuple[str, Array]]:
        yield from WEIGHTS.items()


def context(directory: Path, name: str, keys: Keys | None = KEYS, host: str | None = "127.0.0.1") -> TransportContext:
    return TransportContext(
        directory=str(directory), name=name, host=host, keys=None if keys is None else keys.to_dict()
    )


def receiver(publisher: ZmqPublisher, directory: Path, keys: Keys | None = KEYS) -> WeightReceiver:
    transport = ZmqTransport(ZmqSettings(chunk_bytes=1000))
    return transport.receiver(context(directory, "rollout-0", keys), publisher.address())


def soon(condition: Callable[[], bool]) -> None:
    """Until the condition holds; fails after 30 s."""
    end = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < end, "it never came true"


def assert_served(publisher: ZmqPublisher, directory: Path) -> None:
    member = receiver(publisher, directory)
    received = dict(member.fetch(member.manifest(0, deadline=10), deadline=10))
    assert {name: tensor.tobytes() for name, tensor in received.items()} == {
        name: tensor.tobytes() for name, tensor in WEIGHTS.items()
    }
    member.close()


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[ZmqPublisher]:
    made = ZmqTransport(ZmqSettings()).publisher(context(tmp_path, "trainer"))
    assert isinstance(made, ZmqPublisher)
    made.publish(0, Source())
    yield made
    made.close()
    made.close()


def test_a_holder_of_the_keys_fetches_from_the_port_that_the_system_chose(
    publisher: ZmqPublisher, tmp_path: Path
) -> None:
    assert publisher.address().startswith("tcp://127.0.0.1:")
    assert not publisher.address().endswith(":0")
    assert_served(publisher, tmp_path)
    assert not publisher.refused


def test_a_receiver_with_another_run_s_keys_gets_nothing_and_the_publisher_goes_on(
    publisher: ZmqPublisher, tmp_path: Path
) -> None:
    stranger = receiver(publisher, tmp_path, Keys.generate())
    with pytest.raises(DeadlineError):
        stranger.manifest(0, deadline=0.2)
    stranger.close()
    assert_served(publisher, tmp_path)


def test_a_receiver_that_knows_only_the_public_key_is_refused_and_counted(
    publisher: ZmqPublisher, tmp_path: Path
) -> None:
    half = Keys.from_dict({**Keys.generate().to_dict(), "server_public": KEYS.server_public})
    stranger = receiver(publisher, tmp_path, half)
    with pytest.raises(DeadlineError):
        stranger.manifest(0, deadline=0.2)
    soon(lambda: publisher.refused["wrong key"] >= 1)
    stranger.close()
    assert_served(publisher, tmp_path)


def test_a_peer_without_any_key_gets_no_answer_and_the_publisher_goes_on(
    publisher: ZmqPublisher, tmp_path: Path
) -> None:
    with zmq.Context() as plain, plain.socket(zmq.DEALER) as socket:
        socket.linger = 0
        socket.connect(publisher.address())
        socket.send_multipart(encode(AskManifest(1, 0)))
        assert not socket.poll(200)
    assert_served(publisher, tmp_path)


def test_neither_side_uses_tcp_without_keys(publisher: ZmqPublisher, tmp_path: Path) -> None:
    with pytest.raises(WireError, match="without keys"):
        receiver(publisher, tmp_path, None)
    with pytest.raises(WireError, match="without keys"):
        ZmqTransport(ZmqSettings()).publisher(context(tmp_path, "trainer", None))


def test_a_publisher_that_cannot_listen_leaves_nothing_open(publisher: ZmqPublisher) -> None:
    with pytest.raises(WireError, match="cannot listen"):
        ZmqPublisher(publisher.address(), keys=KEYS)


def test_the_text_of_a_context_hides_the_keys(tmp_path: Path) -> None:
    text = repr(context(tmp_path, "trainer"))
    assert "trainer" in text
    assert not any(key in text for key in KEYS.to_dict().values())
