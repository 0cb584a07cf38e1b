"""Weights in files: whole or absent, small where little changed, and never another version's."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load_file

from headrace.contract import Array, TransportContext
from headrace.errors import ConfigError, DeadlineError, RunError, WireError
from headrace_weights.disk.deltas import apply, encode
from headrace_weights.disk.files import FileReader, FileWriter
from headrace_weights.disk.publisher import DiskPublisher
from headrace_weights.disk.receiver import DiskReceiver
from headrace_weights.disk.transport import DiskSettings, DiskTransport
from support.weights import Source, equal, fetch, other_process, weights

TRAINER = """
import sys
import numpy as np
from headrace.contract import WeightSource
from headrace_weights.disk.publisher import DiskPublisher

class Source(WeightSource):
    def tensors(self):
        yield "w", np.arange(1000, dtype=np.float32)

publisher = DiskPublisher({folder!r}, full_every=10)
publisher.publish(1, Source())
print(publisher.address(), flush=True)
sys.stdin.read()
"""


@pytest.fixture
def publisher(tmp_path: Path) -> Iterator[DiskPublisher]:
    publisher = DiskPublisher(str(tmp_path), full_every=4)
    yield publisher
    publisher.close()
    publisher.close()


def home(publisher: DiskPublisher) -> Path:
    return Path(publisher.address().removeprefix("file://"))


def files(publisher: DiskPublisher) -> dict[str, int]:
    """Name and bytes of the weight files."""
    return {path.name: path.stat().st_size for path in sorted(home(publisher).glob("*.safetensors"))}


def bf16_step(tensors: dict[str, Array], seed: int) -> dict[str, Array]:
    """A hundredth of the items change in their last bit, as after a step at a small learning rate."""
    generator = np.random.default_rng(seed)
    stepped = {}
    for name, tensor in tensors.items():
        bits = tensor.view(np.uint16) ^ (generator.random(tensor.shape) < 0.01).astype(np.uint16)
        stepped[name] = bits.view(tensor.dtype)
    return stepped


def bf16(seed: int) -> dict[str, Array]:
    return {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in weights(seed).items()}


def test_the_transport_makes_both_sides_from_a_context(tmp_path: Path) -> None:
    transport = DiskTransport(DiskSettings(path=str(tmp_path)))
    publisher = transport.publisher(TransportContext(directory="/nowhere", name="trainer"))
    publisher.publish(0, Source(weights(0)))
    receiver = transport.receiver(TransportContext(directory="/nowhere", name="rollout-0"), publisher.address())
    assert equal(fetch(receiver, 0), weights(0))
    receiver.close()
    publisher.close()
    assert list(tmp_path.iterdir()) == []


def test_settings_name_a_folder_that_is_there(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="absolute"):
        DiskSettings(path="weights")
    with pytest.raises(ValueError, match="at least 1"):
        DiskSettings(full_every=0)
    with pytest.raises(ConfigError, match="no folder that this user can write to"):
        DiskTransport.preflight(DiskSettings(path=str(tmp_path / "none")), directory=".", origin=lambda key: key)
    DiskTransport.preflight(DiskSettings(path=str(tmp_path)), directory=".", origin=lambda key: key)


def test_a_file_of_all_tensors_is_what_others_call_safetensors(publisher: DiskPublisher) -> None:
    for version in (1, 5):
        publisher.publish(version, Source({**weights(version), "empty": np.empty((0, 3), np.int8)}))
        publisher.retire(version)
    publisher.publish(2, Source(weights(2)))
    publisher.publish(3, Source(weights(3)))
    publisher.publish(4, Source(weights(4)))
    loaded = load_file(home(publisher) / "4.safetensors")
    assert equal({name: loaded[name] for name in weights(4)}, weights(4))


def test_only_every_nth_version_is_written_whole_and_every_version_is_two_files_away(publisher: DiskPublisher) -> None:
    versions = [bf16(0)]
    for seed in range(1, 9):
        versions.append(bf16_step(versions[-1], seed))
    for version, tensors in enumerate(versions):
        publisher.publish(version, Source(tensors))
    sizes = files(publisher)
    whole = {name for name in sizes if "-" not in name}
    assert whole == {"0.safetensors", "4.safetensors", "8.safetensors"}
    assert all(size < sizes["0.safetensors"] / 5 for name, size in sizes.items() if name not in whole)
    late = DiskReceiver(publisher.address())
    for version in (7, 0, 3, 8, 5):
        assert equal(fetch(late, version), versions[version])


def test_back_to_an_earlier_version_s_weights_costs_nothing_and_gives_them(publisher: DiskPublisher) -> None:
    one, other = weights(1), weights(2)
    digests = [publisher.publish(version, Source(t)).digest for version, t in enumerate((one, other, one))]
    assert digests[0] == digests[2] != digests[1]
    receiver = DiskReceiver(publisher.address())
    assert [equal(fetch(receiver, v), t) for v, t in enumerate((one, other, one))] == [True] * 3
    assert files(publisher)["2-0.safetensors"] < 2000


def test_tensors_that_come_go_or_change_their_shape_are_written_whole(publisher: DiskPublisher) -> None:
    first = weights(1)
    second = {"second": first["second"].astype(np.float64), "third": first["first"], "first": first["first"][:100]}
    publisher.publish(1, Source(first))
    publisher.publish(2, Source(second))
    assert equal(fetch(DiskReceiver(publisher.address()), 2), second)


def test_a_file_stays_as_long_as_a_served_version_differs_from_it(publisher: DiskPublisher) -> None:
    for version in range(6):  # whole: 0 and 4
        publisher.publish(version, Source(weights(version)))
    for version in (0, 1, 2):
        publisher.retire(version)
    assert set(files(publisher)) == {"0.safetensors", "3-0.safetensors", "4.safetensors", "5-4.safetensors"}
    receiver = DiskReceiver(publisher.address())
    assert equal(fetch(receiver, 3), weights(3))
    with pytest.raises(WireError, match=r"version 0 is not served by .*; versions \[3, 4, 5\] are"):
        receiver.manifest(0, deadline=5)
    publisher.retire(3)
    publisher.retire(4)
    publisher.retire(5)
    assert set(files(publisher)) == {"4.safetensors"}, "the next version differs from it"


def test_a_version_that_is_retired_while_it_is_read_arrives_whole(publisher: DiskPublisher) -> None:
    publisher.publish(1, Source(weights(1)))
    receiver = DiskReceiver(publisher.address())
    tensors = receiver.fetch(receiver.manifest(1, deadline=5), deadline=5)
    got = dict([next(tensors)])
    publisher.retire(1)
    assert equal({**got, **dict(tensors)}, weights(1))


@pytest.mark.parametrize("damaged", ["1.safetensors", "2-1.safetensors"])
def test_a_bit_that_changes_in_any_file_is_a_wire_error_that_names_the_tensor(
    publisher: DiskPublisher, damaged: str
) -> None:
    publisher.publish(1, Source(bf16(1)))
    publisher.publish(2, Source(bf16_step(bf16(1), 1)))
    path = home(publisher) / damaged
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(WireError, match=r"tensor second of .*2-1\.safetensors: its bytes do not have"):
        fetch(DiskReceiver(publisher.address()), 2)


@pytest.mark.parametrize(
    ("length", "header", "what"),
    [
        (10, b"no JSON at all", "no header that can be read"),
        (1 << 40, b"{}", "no header that can be read"),
        (2, b"{}", "no header that can be read"),
        (53, b'{"__metadata__":{},"w":{"dtype":"F32","shape":"many"}}', "no header that can be read"),
    ],
)
def test_a_file_that_is_none_is_a_wire_error(tmp_path: Path, length: int, header: bytes, what: str) -> None:
    path = tmp_path / "1.safetensors"
    path.write_bytes(length.to_bytes(8, "little") + header)
    with pytest.raises(WireError, match=what):
        FileReader(path)


def test_a_version_of_which_the_disk_takes_only_half_is_a_run_error_and_is_not_served(
    publisher: DiskPublisher, monkeypatch: pytest.MonkeyPatch
) -> None:
    publisher.publish(1, Source(weights(1)))
    write, taken = os.pwrite, []

    def full(file: int, data: memoryview, at: int) -> int:
        if taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        taken.append(len(data))
        return write(file, data, at)

    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", full)
        with pytest.raises(RunError, match=r"version 2 cannot be written to .*: No space left"):
            publisher.publish(2, Source(weights(2)))
    assert set(files(publisher)) == {"1.safetensors"}
    assert not list(home(publisher).glob(".*partial"))
    receiver = DiskReceiver(publisher.address())
    with pytest.raises(WireError, match="version 2 is not served"):
        receiver.manifest(2, deadline=5)
    publisher.publish(2, Source(weights(2)))
    assert equal(fetch(receiver, 2), weights(2))


def test_versions_of_a_killed_trainer_can_be_read_until_the_next_one_removes_them(tmp_path: Path) -> None:
    with other_process(TRAINER.format(folder=str(tmp_path))) as (process, address):
        process.kill()
        process.wait()
    receiver = DiskReceiver(address)
    assert fetch(receiver, 1)["w"][999] == 999
    DiskPublisher(str(tmp_path), full_every=1).close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(DeadlineError, match="whether this machine has the folder"):
        receiver.manifest(1, deadline=0.1)


def test_another_host_s_trainer_is_nobody_s_to_remove(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with other_process(TRAINER.format(folder=str(tmp_path))) as (process, _):
        process.kill()
        process.wait()
    monkeypatch.setattr(socket, "gethostname", lambda: "elsewhere")
    DiskPublisher(str(tmp_path), full_every=1).close()
    assert len(list(tmp_path.iterdir())) == 1


def test_what_is_opened_is_closed(publisher: DiskPublisher) -> None:
    receiver = DiskReceiver(publisher.address())
    for version in range(3):
        publisher.publish(version, Source(weights(version)))
    before = len(os.listdir("/proc/self/fd"))
    for version in range(3):
        fetch(receiver, version)
        next(receiver.fetch(receiver.manifest(version, deadline=5), deadline=5))
        with pytest.raises(WireError):
            receiver.manifest(77, deadline=5)
    assert len(os.listdir("/proc/self/fd")) == before


def test_a_source_that_fails_leaves_no_file(publisher: DiskPublisher) -> None:
    class Failing(Source):
        def tensors(self) -> Iterator[tuple[str, Array]]:
            yield "w", np.ones(3)
            raise ValueError("lost a rank")

    with pytest.raises(ValueError, match="lost a rank"):
        publisher.publish(1, Failing({}))
    assert not list(home(publisher).glob("*safetensors*"))


def test_a_header_that_is_larger_than_guessed_moves_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "w.safetensors"
    data = np.random.default_rng(0).integers(0, 256, 20 << 20, dtype=np.uint8)
    writer = FileWriter(path, reserve=8)
    writer.add("w", data)
    writer.commit({"much": "x" * 1000})
    assert load_file(path)["w"].tobytes() == data.tobytes()


DTYPES = st.sampled_from([np.uint8, np.float16, ml_dtypes.bfloat16, np.float32, np.float64])


@given(
    dtype=DTYPES,
    length=st.integers(0, 5000),
    share=st.sampled_from([0.0, 0.001, 0.02, 0.2, 0.5, 0.9, 1.0]),
    mask=st.integers(0, 255),
    seed=st.integers(0, 99),
)
def test_a_delta_gives_the_new_bytes_exactly_and_is_never_larger_than_they_are(
    tmp_path_factory: pytest.TempPathFactory, dtype: type, length: int, share: float, mask: int, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    width = np.dtype(dtype).itemsize
    old = generator.integers(0, 256, length * width, dtype=np.uint8)
    new = np.where(generator.random(len(old)) < share, old ^ np.uint8(mask), old)
    path = tmp_path_factory.mktemp("delta") / "delta.safetensors"
    writer = FileWriter(path, reserve=0)
    for name, part in encode(7, new, old, width):
        writer.add(name, part)
    assert writer.nbytes <= len(new)
    writer.commit({})
    file, data = FileReader(path), old.copy()
    if "7.whole" in file:
        data = file.array("7.whole", "uint8")
    else:
        apply(file, 7, data, width)
    file.close()
    assert data.tobytes() == new.tobytes()


def test_parts_that_cannot_be_of_a_tensor_are_a_wire_error(tmp_path: Path) -> None:
    path = tmp_path / "delta.safetensors"
    writer = FileWriter(path, reserve=0)
    writer.add("0.0.gaps", np.array([5, 200], np.uint8))
    writer.add("0.0.bytes", np.array([1, 2], np.uint8))
    writer.commit({})
    file = FileReader(path)
    with pytest.raises(WireError, match="tells of tensor 0 what cannot be"):
        apply(file, 0, np.zeros(100, np.uint8), 1)
    file.close()
