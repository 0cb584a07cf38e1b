"""Weights by a collective: who wants a version just then is in one group, and a broken group costs nobody weights."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import Array, TransportContext, WeightManifest, WeightReceiver
from headrace.errors import WireError
from headrace.wire import Keys, ipc_address, manifest_digest, tensor_info
from headrace_weights.collective.group import Meeting, parcels
from headrace_weights.collective.publisher import CollectivePublisher, Round
from headrace_weights.collective.receiver import CollectiveReceiver
from headrace_weights.collective.transport import CollectiveSettings, CollectiveTransport
from support.weights import Source, equal, fetch, other_process, weights

MEMBER = """
import os
from headrace_weights.collective.receiver import CollectiveReceiver
receiver = CollectiveReceiver({address!r}, bucket_bytes=50_000, seconds=5, window=4)
receiver.manifest(1, deadline=10)
print("joins", flush=True)
receiver._group(1, 10)
os.kill(os.getpid(), 9)
"""


class Publisher(CollectivePublisher):
    """Closes a round when it has ``members``, and keeps how many engines each round had."""

    members = 1

    def __init__(self, directory: Path, *, seconds: float = 5) -> None:
        directory.chmod(0o700)
        self.rounds: list[int] = []
        meeting = Meeting(f"{directory}/groups", serve=True, seconds=seconds)
        super().__init__(ipc_address(str(directory), "w"), meeting, bucket_bytes=50_000)

    def _gather(self) -> None:
        self._changed.wait_for(lambda: self._ended or len(self._open[0].ranks) == self.members)

    def _send(self, closed: Round) -> None:
        self.rounds.append(len(closed.ranks))
        super()._send(closed)


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[Publisher]:
    publisher = Publisher(tmp_path)
    yield publisher
    publisher.close()
    publisher.close()


def receiver_of(publisher: Publisher, *, seconds: float = 5) -> CollectiveReceiver:
    return CollectiveReceiver(publisher.address(), bucket_bytes=50_000, seconds=seconds, window=4)


@pytest.fixture
def receivers(publisher: Publisher) -> Iterator[list[CollectiveReceiver]]:
    receivers = [receiver_of(publisher) for _ in range(3)]
    yield receivers
    for receiver in receivers:
        receiver.close()


def many(seed: int) -> dict[str, Array]:
    """Large, small and empty tensors of several dtypes."""
    generator = np.random.default_rng(seed)
    tensors: dict[str, Array] = {
        f"small.{i}": generator.standard_normal(i, dtype=np.float32).astype(dtype)
        for i, dtype in enumerate([np.float32, ml_dtypes.bfloat16, np.float16, ml_dtypes.float8_e4m3fn] * 5)
    }
    tensors["large"] = generator.standard_normal((600, 700), dtype=np.float32)
    tensors["last"] = np.empty((0, 3), np.float32)
    return tensors


def manifest_of(tensors: dict[str, Array]) -> WeightManifest:
    infos = tuple(tensor_info(name, tensor) for name, tensor in tensors.items())
    return WeightManifest(version=0, tensors=infos, nbytes=0, digest=manifest_digest(infos))


def test_the_transport_makes_both_sides_from_a_context(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    transport = CollectiveTransport(CollectiveSettings())
    publisher = transport.publisher(TransportContext(directory=str(tmp_path), name="trainer"))
    publisher.publish(0, Source(weights(0)))
    receiver = transport.receiver(TransportContext(directory=str(tmp_path), name="rollout-0"), publisher.address())
    assert equal(fetch(receiver, 0), weights(0))
    receiver.close()
    publisher.close()


def test_across_hosts_members_meet_at_a_port_of_the_publisher(tmp_path: Path) -> None:
    keys = Keys.generate().to_dict()
    context = TransportContext(directory=str(tmp_path), name="trainer", host="127.0.0.1", keys=keys)
    transport = CollectiveTransport(CollectiveSettings())
    publisher = transport.publisher(context)
    assert publisher.address().startswith("tcp://127.0.0.1:")
    publisher.publish(0, Source(weights(0)))
    receiver = transport.receiver(context, publisher.address())
    assert equal(fetch(receiver, 0), weights(0))
    receiver.close()
    publisher.close()


def test_settings_are_positive() -> None:
    for wrong in ({"bucket_bytes": 0}, {"silent_seconds": 0.0}):
        with pytest.raises(ValueError, match=r"at least 1|above 0"):
            CollectiveSettings(**wrong)  # type: ignore[arg-type]  # one of each kind


def test_selecting_it_imports_no_torch() -> None:
    code = "import sys; from headrace_weights.collective.transport import CollectiveTransport as T; T(T.Settings())"
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True
    )
    assert done.stdout.strip() == "False"


def fetch_at_once(receivers: Sequence[WeightReceiver], version: int) -> list[dict[str, Array]]:
    with ThreadPoolExecutor(len(receivers)) as pool:
        return list(pool.map(fetch, receivers, [version] * len(receivers)))


def test_engines_that_want_a_version_at_once_are_one_group(
    publisher: Publisher, receivers: list[CollectiveReceiver], caplog: pytest.LogCaptureFixture
) -> None:
    publisher.members = 3
    publisher.publish(1, Source(many(1)))
    assert all(equal(tensors, many(1)) for tensors in fetch_at_once(receivers, 1))
    assert publisher.rounds == [3]
    assert caplog.records == [], "no round broke"


def test_engines_that_stay_keep_their_group(publisher: Publisher, receivers: list[CollectiveReceiver]) -> None:
    publisher.members = 3
    keys = set()
    for version in range(3):
        publisher.publish(version, Source(many(version)))
        assert all(equal(tensors, many(version)) for tensors in fetch_at_once(receivers, version))
        keys.add(publisher._meeting.group_key)
    assert len(keys) == 1


def test_a_round_waits_for_no_more_engines_than_had_the_version_before(tmp_path: Path) -> None:
    waited: list[bool] = []

    class Waiting(Publisher):
        def _gather(self) -> None:
            if not self._ended:
                waited.append(self._complete(self._open[0]))

    publisher = Waiting(tmp_path)
    receiver = receiver_of(publisher)
    for version in range(3):
        publisher.publish(version, Source(many(version)))
        assert equal(fetch(receiver, version), many(version))
    assert waited == [False, True, True], "of the first version nobody knows how many want it"
    receiver.close()
    publisher.close()


def test_engines_join_and_leave_from_version_to_version(publisher: Publisher, caplog: pytest.LogCaptureFixture) -> None:
    receivers: list[WeightReceiver] = []
    for version in range(4):
        publisher.publish(version, Source(many(version)))
        receivers.append(receiver_of(publisher))
        if version == 2:
            receivers.pop(0).close()
        publisher.members = len(receivers)
        assert all(equal(tensors, many(version)) for tensors in fetch_at_once(receivers, version))
    assert publisher.rounds == [1, 2, 2, 3]
    assert caplog.records == [], "no round broke"
    for receiver in receivers:
        receiver.close()


def test_a_member_that_dies_in_its_group_costs_the_others_no_weights(tmp_path: Path) -> None:
    publisher = Publisher(tmp_path, seconds=1)
    publisher.members = 2
    publisher.publish(1, Source(many(1)))
    survivor, late = (receiver_of(publisher, seconds=1) for _ in range(2))
    with other_process(MEMBER.format(address=publisher.address())) as (process, said):
        assert said == "joins"
        assert equal(fetch(survivor, 1), many(1))
        assert process.wait() == -9
    assert publisher.rounds == [2]
    publisher.members = 1
    assert equal(fetch(late, 1), many(1))
    assert publisher.rounds == [2, 1]
    for side in (survivor, late, publisher):
        side.close()


def test_a_tensor_that_arrives_damaged_is_asked_for_again(
    publisher: Publisher, receivers: list[CollectiveReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(1, Source(many(1)))
    manifest = receivers[0].manifest(1, deadline=10)

    class Damaged:
        """A group from which nothing arrives."""

        def send(self, data: Array) -> Damaged:
            data[...] = 7
            return self

        def wait(self) -> None:
            return

    monkeypatch.setattr(receivers[0], "_group", lambda *_: Damaged())
    assert equal(dict(receivers[0].fetch(manifest, deadline=10)), many(1))


def test_a_group_that_cannot_be_had_is_done_without(
    publisher: Publisher, receivers: list[CollectiveReceiver], monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(1, Source(many(1)))
    manifest = receivers[0].manifest(1, deadline=10)

    def none(*_: object) -> None:
        raise RuntimeError("the others did not come")

    monkeypatch.setattr(Meeting, "group", none)
    assert equal(dict(receivers[0].fetch(manifest, deadline=10)), many(1))


def test_a_version_that_is_not_served_is_refused_by_name(
    publisher: Publisher, receivers: list[CollectiveReceiver]
) -> None:
    publisher.publish(1, Source(many(1)))
    manifest = receivers[0].manifest(1, deadline=10)
    publisher.retire(1)
    with pytest.raises(WireError, match="version 1 is not served"):
        list(receivers[0].fetch(manifest, deadline=10))


@pytest.mark.parametrize("bucket_bytes", [1, 100, 50_000, 1 << 30])
def test_parcels_hold_every_byte_once_whatever_their_size(bucket_bytes: int) -> None:
    manifest = manifest_of({**many(1), **({} if bucket_bytes == 1 else {"more": np.zeros(400_000)})})
    if bucket_bytes == 1:
        manifest = manifest_of({name: tensor for name, tensor in many(1).items() if name != "large"})
    covered: dict[int, int] = {}
    end = 0
    for begin, stop, tensors in parcels(manifest, bucket_bytes):
        assert begin >= end
        assert stop > begin
        assert len(tensors) == 1 or stop - begin <= bucket_bytes
        for number, _ in tensors:
            covered[number] = covered.get(number, 0) + 1
        end = stop
    sizes = [info.shape != () and 0 not in info.shape for info in manifest.tensors]
    assert sorted(covered) == [number for number, filled in enumerate(sizes) if filled]
