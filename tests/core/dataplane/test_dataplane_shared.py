"""Values that lie in memory which producers, units and consumers of one host share."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array, Column, Ragged
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.dataplane.messages import Described, Reserve, Reserved
from headrace.dataplane.shared import SHARED_BYTES, Segments
from headrace.errors import ContractError, DeadlineError, RunError
from headrace.wire import BlockingClient, Sent
from headrace_storage.shared_memory import SharedMemoryStorage
from support.data_plane import Services, soon

IMAGE = SHARED_BYTES // 2
SCHEMA = {
    "image": ColumnSchema("uint8", (IMAGE,)),
    "tokens": ColumnSchema("int32", ragged=True),
    "reward": ColumnSchema("float32"),
}
SPEC = PartitionSpec("phase", SCHEMA, {"train": tuple(SCHEMA), "look": ("image",)}, length_of="tokens")


@pytest.fixture
def storage(tmp_path: Path) -> SharedMemoryStorage:
    table = SharedMemoryStorage.Settings(directory=str(tmp_path), segment_bytes=1 << 20)
    return SharedMemoryStorage(table)


@pytest.fixture(params=["beside the ledger", "elsewhere"])
def services(tmp_path: Path, storage: SharedMemoryStorage, request: pytest.FixtureRequest) -> Iterator[Services]:
    """With one unit, in the ledger's process or in one of its own."""
    sockets = tmp_path / "sockets"
    sockets.mkdir(0o700)
    running = Services(sockets, own=storage if request.param == "beside the ledger" else None)
    if request.param == "elsewhere":
        running.unit(storage=storage)
    yield running
    running.close()


@pytest.fixture
def partition(services: Services) -> Partition:
    return services.plane().create(SPEC)


@pytest.fixture
def sent(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Methods that clients call, in order."""
    methods: list[str] = []
    send = BlockingClient.send

    def recording(self: BlockingClient, method: str, *rest: Any, **options: Any) -> Sent:
        methods.append(method)
        return send(self, method, *rest, **options)

    monkeypatch.setattr(BlockingClient, "send", recording)
    return methods


def columns(values: list[int], length: int = 3) -> dict[str, Column]:
    tokens = Ragged.from_arrays([np.full(length, value, np.int32) for value in values])
    return {
        "image": np.stack([np.full(IMAGE, value, np.uint8) for value in values]),
        "tokens": tokens,
        "reward": np.array(values, np.float32),
    }


def images(batch: Any) -> Array:
    found: Array = batch.dense("image")
    return found


def test_large_values_are_written_and_read_where_they_lie(partition: Partition, sent: list[str]) -> None:
    partition.put(columns([1, 2, 3, 4], length=SHARED_BYTES // 8))
    held = partition.lease("train", 4)
    batch, again = partition.get(held), partition.get(held)
    assert images(batch)[:, -1].tolist() == [1, 2, 3, 4]
    assert [part[-1] for part in batch.ragged("tokens")] == [1, 2, 3, 4]
    assert batch.dense("reward").tolist() == [1, 2, 3, 4]
    assert held.tokens.tolist() == [SHARED_BYTES // 8] * 4
    assert np.shares_memory(images(batch), images(again)), "reading copies nothing"
    assert np.shares_memory(batch.ragged("tokens").values, again.ragged("tokens").values)
    assert not np.shares_memory(batch.dense("reward"), again.dense("reward")), "what is small is sent"
    assert not images(batch).flags.writeable
    with pytest.raises(ValueError):
        images(batch).setflags(write=True)
    assert [method for method in sent if method in ("put", "get")] == []


def test_rows_that_do_not_lie_side_by_side_are_joined(partition: Partition) -> None:
    for value in (1, 3, 5):
        partition.put(columns([value, value + 1]))
    partition.acknowledge(partition.lease("look", 6))
    first = partition.lease("train", 2)
    partition.acknowledge(first)
    held = partition.lease("train", 4)
    assert images(partition.get(held))[:, 0].tolist() == [3, 4, 5, 6]


def test_small_puts_are_sent_and_read_like_others(partition: Partition, sent: list[str]) -> None:
    rows = [partition.put(columns([value])) for value in (1, 2, 3)]
    assert sent.count("put") == 3
    assert "reserve" not in sent
    held = partition.lease("train", 3)
    assert held.rows.tolist() == np.concatenate(rows).tolist()
    batch = partition.get(held)
    assert images(batch)[:, 0].tolist() == [1, 2, 3]


def test_small_values_of_a_unit_beside_the_ledger_come_with_the_lease(
    tmp_path: Path, storage: SharedMemoryStorage, sent: list[str]
) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir(0o700)
    services = Services(sockets, own=storage)
    try:
        partition = services.plane().create(SPEC)
        partition.put(columns([1]))
        _, batch = partition.take("train", 1)
        assert images(batch)[0, 0] == 1
        assert sent[-1] == "lease"
        partition.put(columns([2, 3]))
        _, batch = partition.take("train", 2)
        assert images(batch)[:, 0].tolist() == [2, 3]
        assert sent[-1] == "locate"
    finally:
        services.close()


def test_a_client_that_cannot_map_the_memory_is_served_by_message(
    partition: Partition, storage: SharedMemoryStorage, sent: list[str]
) -> None:
    Path(storage.directory).chmod(0o755)  # which a client distrusts
    partition.put(columns([1, 2, 3]))
    held = partition.lease("train", 3)
    assert images(partition.get(held))[:, 0].tolist() == [1, 2, 3]
    assert {"reserve", "locate"}.isdisjoint(sent)


def test_memory_of_rows_that_left_is_used_again(partition: Partition, storage: SharedMemoryStorage) -> None:
    for _ in range(50):
        partition.put(columns([1, 2, 3, 4]))
        for consumer in SPEC.consumers:
            partition.acknowledge(partition.lease(consumer, 4))
        partition.stats()
    assert len(list(Path(storage.directory).glob("*.values"))) <= 2


def test_values_that_nobody_wants_any_more_are_abandoned(partition: Partition, storage: SharedMemoryStorage) -> None:
    rows = partition.put({"reward": np.zeros(4, np.float32)})
    partition.drop(rows[:2].tolist())
    image = columns([1, 2, 3, 4])["image"]
    noted = partition.try_put({"image": image}, rows=rows)
    assert noted.refused.tolist() == [2, 2, 0, 0]
    assert images(partition.get(partition.lease("look", 2)))[:, 0].tolist() == [3, 4]
    soon(lambda: storage.stats().nbytes == 2 * (IMAGE + 4))
    assert partition.try_put({"image": image}, rows=rows).refused.tolist() == [2, 2, 1, 1]
    assert partition.put({"image": image[:0]}, rows=rows[:0]).tolist() == []


def test_a_put_that_is_not_what_the_schema_says_is_refused_and_its_memory_free(
    partition: Partition, storage: SharedMemoryStorage
) -> None:
    for _ in range(100):
        with pytest.raises(ContractError, match=r"is dense uint8 \[32768\], a put gave dense int16 \[32768\]"):
            partition.put({"image": np.zeros((4, IMAGE), np.int16)})
    assert len(list(Path(storage.directory).glob("*.values"))) == 1
    partition.put(columns([1, 2, 3]))


def test_a_full_unit_keeps_large_puts_waiting_and_one_that_gave_up_leaves_nothing(
    tmp_path: Path, storage: SharedMemoryStorage
) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir(0o700)
    services = Services(sockets, own=storage, capacity=5 * IMAGE)
    try:
        partition = services.plane().create(SPEC)
        partition.put(columns([1, 2, 3]))
        for _ in range(20):
            with pytest.raises((DeadlineError, RunError)):  # whichever of the two sides gives up first
                services.plane().partition("phase").put(columns([4, 5, 6]), deadline=0.02)
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(lambda: services.plane().partition("phase").put(columns([7, 8, 9])))
            for consumer in SPEC.consumers:
                partition.acknowledge(partition.lease(consumer, 3))
            waiting.result(30)
        assert images(partition.get(partition.lease("train", 3)))[:, 0].tolist() == [7, 8, 9]
        assert len(list(Path(storage.directory).glob("*.values"))) == 1
    finally:
        services.close()


def test_what_a_producer_that_died_had_reserved_is_given_to_others(
    services: Services, partition: Partition, storage: SharedMemoryStorage
) -> None:
    unit = services.plane()
    address = unit.client().call("describe", "phase", reply=Described, deadline=30).units[0]
    dying, other = Segments(storage.directory), Segments(storage.directory)

    def reserve(segments: Segments) -> Reserved:
        request = Reserve(SHARED_BYTES, segments.owner)
        return unit.client(address).call("reserve", request, reply=Reserved, deadline=30)

    first, second = reserve(dying).region, reserve(other).region
    assert first is not None
    assert second is not None
    assert first.offset != second.offset
    dying.close()
    third = reserve(other).region
    assert third is not None
    assert third.offset == first.offset
    other.close()


def test_memory_of_a_unit_that_was_there_before_is_not_taken_for_that_of_the_one_at_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dataplane.shared.LOOK_SECONDS", 1000.0)
    tmp_path.chmod(0o700)
    services = Services(tmp_path)
    try:
        services.unit(storage=SharedMemoryStorage(SharedMemoryStorage.Settings(directory=str(tmp_path))))
        producer = services.plane().create(SPEC)
        consumer = services.plane().partition("phase")
        lost = producer.put(columns([1, 2]))
        assert images(consumer.get(consumer.lease("train", 2)))[:, 0].tolist() == [1, 2]
        services.lose_unit(1)
        services.unit(storage=SharedMemoryStorage(SharedMemoryStorage.Settings(directory=str(tmp_path))), at=1)
        assert consumer.lost(wait=30) == lost.tolist()
        producer.put(columns([3, 4]))
        other = services.plane().partition("phase")
        assert images(other.get(other.lease("train", 2)))[:, 0].tolist() == [3, 4]
        other.put(columns([5, 6]))
        assert images(consumer.get(consumer.lease("train", 2)))[:, 0].tolist() == [5, 6]
    finally:
        services.close()


def test_without_memory_a_put_is_refused_and_its_rows_are_given_to_nobody(
    partition: Partition, storage: SharedMemoryStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as full:
        full.setattr("headrace_storage.pool.Pool.take", lambda self, nbytes: None)
        with pytest.raises(RunError, match="find no room in the shared memory"):
            partition.put(columns([1, 2, 3]))
    assert partition.stats().rows == 0
    partition.put(columns([4, 5]))
    assert images(partition.get(partition.lease("train", 2)))[:, 0].tolist() == [4, 5]


def test_segments_that_the_unit_gave_back_are_not_kept_mapped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.dataplane.shared.LOOK_SECONDS", 0.0)
    table = SharedMemoryStorage.Settings(directory=str(tmp_path), segment_bytes=SHARED_BYTES, spare_bytes=0)
    storage = SharedMemoryStorage(table)
    segments = Segments(storage.directory)
    for number in range(3):
        region = storage.reserve(SHARED_BYTES, owner=segments.owner)
        assert region is not None
        placed = segments.write(region, {"image": np.full((1, SHARED_BYTES), number, np.uint8)})
        storage.open(region, placed)
        storage.adopt(region, np.array([number]))
        read = segments.read(storage.locate([number], ["image"])["image"])
        storage.delete([number])
        assert isinstance(read, np.ndarray)
        assert read[0, 0] == number, "a view stays valid"
    del read
    assert Path("/proc/self/maps").read_text().count(storage.directory) <= 2, "what was written and read last"
    segments.close()
    segments.close()
    storage.close()
    assert storage.directory not in Path("/proc/self/maps").read_text()
