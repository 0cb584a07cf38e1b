"""Columns by content: what many rows have in common is sent once and kept once; ``test_plane_machine.py`` compares what
is kept with a model, under any order of operations."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Array, Batch, Ragged, Repeated
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.dataplane.contents import Contents, by_content
from headrace.dataplane.messages import Noted, Put, UnitFigures
from headrace.errors import ContractError
from headrace_storage.memory import MemoryStorage
from headrace_storage.shared_memory import SharedMemoryStorage
from support.data_plane import Services
from support.plane_world import World

IMAGE = ColumnSchema("uint8", (64, 64, 3), by_content=True)
IMAGE_BYTES = 64 * 64 * 3
ID_BYTES = 8
SPEC = PartitionSpec(
    "phase",
    {"reward": ColumnSchema("float32"), "image": IMAGE, "words": ColumnSchema("int32", ragged=True, by_content=True)},
    {"look": ("image",), "read": ("words", "reward")},
    group_size=4,
)


@pytest.fixture
def world() -> Iterator[World]:
    running = World()
    yield running
    running.close()


def images(*shades: int) -> Array:
    return np.stack([np.full(IMAGE.shape, shade, np.uint8) for shade in shades])


def put(partition: Partition, *shades: int) -> list[int]:
    """An image and words for each row."""
    words = Ragged.from_arrays([np.arange(shade, dtype=np.int32) for shade in shades])
    columns = {"reward": np.ones(len(shades), np.float32), "image": images(*shades), "words": words}
    return partition.put(columns).tolist()


def test_what_a_group_has_in_common_is_sent_once_and_kept_once(world: World) -> None:
    unit = world.unit()
    partition = world.plane().create(SPEC)
    put(partition, 5, 5, 5, 5)
    assert IMAGE_BYTES < world.bytes_to[unit, "put"] < 1.1 * IMAGE_BYTES
    assert world.storages[unit].stats().nbytes == IMAGE_BYTES + 5 * 4 + 4 * (4 + 2 * ID_BYTES)
    put(partition, 5, 5, 6, 6)
    assert world.storages[unit].stats().nbytes == 2 * IMAGE_BYTES + (5 + 6) * 4 + 8 * (4 + 2 * ID_BYTES)


def test_a_consumer_gets_each_value_once_and_who_has_it(world: World) -> None:
    unit = world.unit()
    partition = world.plane().create(SPEC)
    put(partition, 5, 7, 5, 7)
    _, batch = partition.take("look", 1)
    assert len(batch.repeated["image"].values) == 2
    assert (batch.repeated["image"].column() == images(5, 7, 5, 7)).all()
    assert world.bytes_from[unit, "get"] < 2.1 * IMAGE_BYTES
    _, batch = partition.take("read", 1)
    assert [len(words) for words in batch.repeated["words"].column()] == [5, 7, 5, 7]
    assert batch.dense("reward").tolist() == [1, 1, 1, 1]
    assert "image" not in batch.repeated, "which was not asked for"


def test_rows_of_several_units_are_gathered_with_what_they_share(world: World) -> None:
    for _ in range(2):
        world.unit()
    partition = world.plane().create(SPEC)
    shades: dict[int, int] = {}
    for of_group in [(1, 1, 2, 2), (2, 2, 3, 3), (1, 1, 1, 3)]:
        shades |= zip(put(partition, *of_group), of_group, strict=True)
    rows, batch = partition.take("look", 3)
    wanted = images(*(shades[row] for row in rows.rows.tolist()))
    assert (batch.repeated["image"].column() == wanted).all()
    part = batch.take([1, 5, 4])
    assert len(part.repeated["image"].values) <= 3, "only what these rows have"
    assert (part.repeated["image"].column() == wanted[[1, 5, 4]]).all()


def test_a_value_stays_as_long_as_a_row_has_it(world: World) -> None:
    unit = world.unit()
    partition = world.plane().create(SPEC)
    first, _ = put(partition, 5, 5, 5, 5)[0], put(partition, 5, 5, 5, 6)
    partition.drop([first // 4])
    world.settle()
    assert world.storages[unit].stats().nbytes == 2 * IMAGE_BYTES + (5 + 6) * 4 + 4 * (4 + 2 * ID_BYTES)
    held, batch = partition.take("look", 1)
    assert (batch.repeated["image"].column() == images(5, 5, 5, 6)).all()
    partition.release(held)
    partition.drop([first // 4 + 1])
    world.settle()
    assert world.storages[unit].stats().nbytes == 0


def test_rows_that_the_ledger_refuses_hold_no_value(world: World) -> None:
    unit = world.unit()
    partition = world.plane().create(SPEC)
    rows = partition.put({"reward": np.ones(4, np.float32)})
    partition.put({"image": images(1, 1)}, rows=rows[:2])
    noted = partition.try_put({"image": images(9, 2, 2)}, rows=rows[1:])
    assert noted.refused is not None
    assert noted.refused.tolist() == [1, 0, 0]
    assert world.storages[unit].stats().nbytes == 2 * IMAGE_BYTES + 4 * (4 + ID_BYTES)


def test_a_put_that_says_itself_what_is_shared_is_taken_as_it_is(world: World) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    shared = Repeated(images(3, 4), np.array([1, 0, 0, 1]))
    partition.put({"image": shared})
    _, batch = partition.take("look", 1)
    assert (batch.repeated["image"].column() == images(4, 3, 3, 4)).all()


@pytest.mark.parametrize("way", ["sent", "mapped"])
def test_bytes_of_what_is_shared_are_counted_once_on_each_way(services: Services, way: str) -> None:
    services.unit(storage=SharedMemoryStorage(SharedMemoryStorage.Settings()) if way == "mapped" else None)
    partition = services.plane().create(SPEC)
    put(partition, 5, 5, 5, 6)
    for consumer in SPEC.consumers:
        _, batch = partition.take(consumer, 1)
        if consumer == "look":
            assert (batch.repeated["image"].column() == images(5, 5, 5, 6)).all()
            assert batch.repeated["image"].values.flags.writeable is (way == "sent"), "mapped values are views"
    (unit,) = partition._units.addresses
    figures = services.plane().client(unit).call("figures", reply=UnitFigures, deadline=30)
    moved = {(hop, column): nbytes for hop, _, column, nbytes in figures.traffic}
    assert moved["put", "image"] == moved[way, "image"] == 2 * IMAGE_BYTES
    assert figures.rows == 4, "values are no rows"


@pytest.fixture
def services(tmp_path: Path) -> Iterator[Services]:
    tmp_path.chmod(0o700)
    running = Services(tmp_path)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("column", "said"),
    [
        ({"reward": Repeated(np.ones(1, np.float32), np.zeros(4, np.int64))}, "a put gave dense float32 .* by content"),
        ({"image": Repeated(np.ones((1, 3), np.uint8), np.zeros(4, np.int64))}, "a put gave dense uint8 .* by content"),
        ({"image": np.ones((4, 64, 64, 3), np.float32)}, "is dense uint8 .* by content, a put gave dense float32"),
    ],
)
def test_a_column_of_the_other_kind_is_refused_in_words(world: World, column: dict[str, Repeated], said: str) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    with pytest.raises(ContractError, match=said):
        partition.put(column)


def test_a_put_that_does_not_say_what_is_shared_is_refused(world: World) -> None:
    """Whoever speaks to a unit without this client is told that the column is by content."""
    unit = world.unit()
    world.plane().create(SPEC)
    with pytest.raises(ContractError, match="by content, a put gave dense uint8"):
        world.plane().client(unit).call("put", Put("phase", None, {"image": images(1)}, 0), reply=Noted, deadline=9)


def test_places_beyond_the_values_are_refused(world: World) -> None:
    unit = world.unit()
    world.plane().create(SPEC)
    beyond = Repeated(images(1, 2), np.array([0, 1]))
    object.__setattr__(beyond, "values", images(1))
    with pytest.raises(ContractError, match="places must be from 0 to 0"):
        world.plane().client(unit).call("put", Put("phase", None, {"image": beyond}, 0), reply=Noted, deadline=9)


def test_tokens_are_not_counted_by_a_column_by_content(world: World) -> None:
    with pytest.raises(ContractError, match="length_of = 'words'"):
        world.plane().create(PartitionSpec("other", SPEC.columns, SPEC.consumers, length_of="words"))


class _Full(MemoryStorage):
    """Has no room for rows, only for values."""

    def put(self, batch: Batch) -> int:
        if batch.rows.min() >= 0:
            raise OSError("no room")
        return super().put(batch)


def test_a_put_that_the_storage_does_not_keep_leaves_no_value_behind() -> None:
    storage = _Full(None)
    contents = Contents(storage)
    with pytest.raises(OSError, match="no room"):
        contents.put(Batch(rows=np.arange(3), columns={}, repeated={"image": by_content(images(1, 1, 2))}))
    assert storage.stats().nbytes == contents.stats().rows == 0
