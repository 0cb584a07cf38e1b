"""A put whose answer did not come is put again under its name, and kept once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Batch
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.dataplane.messages import Noted, Put
from headrace.dataplane.named_puts import NamedPuts
from headrace.dataplane.shared import SHARED_BYTES
from headrace.errors import ContractError, DeadlineError, RunError
from headrace_storage.memory import MemoryStorage
from headrace_storage.shared_memory import SharedMemoryStorage
from support.data_plane import Services
from support.plane_world import World

SPEC = PartitionSpec("phase", {"reward": ColumnSchema("float64")}, {"train": ("reward",)}, 2)
SILENCE = 7
"""Seconds after which a unit that is gone is missed."""


def put(partition: Partition, once: str = "", *, rows: int = 2, deadline: float = 10) -> list[int]:
    ids: list[int] = partition.put({"reward": np.ones(rows)}, once=once, deadline=deadline).tolist()
    return ids


@pytest.fixture(params=["beside the ledger", "elsewhere", "two ledgers"])
def somewhere(request: pytest.FixtureRequest) -> Iterator[World]:
    """With two storage units, of which one may be in the ledger's process."""
    running = World(own=request.param == "beside the ledger", shards=1 + (request.param == "two ledgers"))
    while len(running.storages) < 2:
        running.unit()
    yield running
    running.close()


def test_what_is_put_again_under_its_name_is_kept_once_and_has_the_same_ids(somewhere: World) -> None:
    partition = somewhere.plane().create(SPEC)
    first = put(partition, "first", rows=4)
    second = put(partition, "second")
    for _ in range(3):
        for peer in (partition, somewhere.plane().partition("phase")):
            assert put(peer, "first", rows=4) == first
            assert put(peer, "second") == second
    assert partition.try_put({"reward": np.ones(2)}, once="second").refused.tolist() == [1, 1]
    assert partition.stats().rows == sum(storage.stats().rows for storage in somewhere.storages.values()) == 6
    held = partition.lease("train", 3)
    partition.get(held)
    partition.acknowledge(held)
    assert put(partition, "first", rows=4) == first, "though it was trained"
    assert partition.stats().rows == sum(storage.stats().rows for storage in somewhere.storages.values()) == 0


def test_puts_without_a_name_are_different_puts(somewhere: World) -> None:
    partition = somewhere.plane().create(SPEC)
    put(partition), put(partition)
    assert partition.stats().rows == 4


def test_one_whose_answer_came_too_late_says_how_to_put_it_again(world: World) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    put(partition)
    answer_now = world.hold("note")
    with pytest.raises(DeadlineError) as told:
        put(partition, "again", deadline=1)
    assert "once=" in told.value.fix
    answer_now()
    assert partition.stats().rows == 4, "it is kept, which nobody could know"
    assert len(put(partition, "again")) == 2
    assert partition.stats().rows == 4


@pytest.mark.parametrize("named", [True, False])
def test_of_many_real_puts_that_nobody_waited_for_the_named_ones_are_kept_once(
    services: Services, *, named: bool
) -> None:
    services.unit()
    partition = services.plane().create(SPEC)
    put(partition, "warm")
    for number in range(50):
        once = f"put {number}" if named else ""
        with pytest.raises(DeadlineError):
            services.plane().client(partition._units.addresses[0]).call(
                "put", Put("phase", None, {"reward": np.ones(2)}, 0, once=once), reply=Noted, deadline=1e-6
            )
        put(partition, once)
    rows = partition.stats().rows
    assert rows == 2 * 51 if named else rows > 2 * 51


def test_a_name_is_for_one_number_of_new_rows_and_not_long(world: World) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    rows = put(partition, "x" * 100)
    for wrong, said in (
        (lambda: put(partition, "x" * 100, rows=4), "a put of 4 rows is named 'xxx.*, as one of 2 was before"),
        (lambda: put(partition, "x" * 101), "the name of a put has 101 characters"),
        (
            lambda: partition.put({"reward": np.ones(2)}, rows=np.array(rows), once="y"),
            "a put of rows that have ids is named 'y'",
        ),
    ):
        with pytest.raises(ContractError, match=said) as told:
            wrong()
        assert told.value.fix
    assert partition.stats().rows == 2


def test_what_was_lost_is_made_anew_under_the_same_name(world: World) -> None:
    world.unit(), world.unit()
    partition = world.plane().create(SPEC)
    kept, lost = put(partition, "kept"), put(partition, "lost")
    world.lose("unit-2")
    world.wait(SILENCE)
    assert partition.lost() == [lost[0] // 2]
    assert put(partition, "kept") == kept
    anew = put(partition, "lost")
    assert anew != lost
    assert put(partition, "lost") == anew
    assert partition.stats().rows == 4


class Full(MemoryStorage):
    refuses = True

    def put(self, batch: Batch) -> int:
        if self.refuses and len(batch):
            raise RunError("the disk is full", fix="make room")
        return super().put(batch)


def test_what_a_storage_could_not_keep_is_kept_when_it_is_put_again(world: World) -> None:
    storage = Full(None)
    world.unit(storage=storage)
    partition = world.plane().create(SPEC)
    with pytest.raises(RunError, match="the disk is full"):
        put(partition, "again")
    storage.refuses = False
    put(partition, "again")
    assert partition.stats().rows == storage.stats().rows == 2


def test_whoever_heard_that_rows_are_kept_which_a_storage_then_refused_is_told_that_they_are_lost(world: World) -> None:
    """The ledger has taken them, and answers who puts them again at another unit, before the first one tries to keep
    them."""
    first = world.unit(storage=Full(None))
    partition = world.plane().create(SPEC)
    with pytest.raises(RunError, match="the disk is full"):
        put(partition)
    unkept = world.hold("unkept")
    refused = world.say(first, "put", Put("phase", None, {"reward": np.ones(2)}, 0, once="again"), Noted)
    assert isinstance(refused.answer.exception(), RunError)
    ids = put(partition, "again")
    unkept()
    assert partition.lost() == [ids[0] // 2]


def test_names_go_into_a_snapshot(world: World, tmp_path: Path) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    rows = put(partition, "before")
    world.plane().snapshot(tmp_path / "file")
    after = World()
    after.unit()
    after.plane().restore(tmp_path / "file")
    again = after.plane().partition("phase")
    assert put(again, "before") == rows
    assert again.stats().rows == 2
    after.close()


def test_the_newest_names_are_remembered(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.dataplane.named_puts.REMEMBERED", 3)
    world.unit()
    partition = world.plane().create(SPEC)
    ids = {name: put(partition, name) for name in "abcd"}
    assert {name: put(partition, name) for name in "bcd"} == {name: ids[name] for name in "bcd"}
    assert put(partition, "a") != ids["a"]
    assert partition.stats().rows == 10


def test_a_put_that_is_put_again_takes_no_shared_memory(tmp_path: Path) -> None:
    sockets = tmp_path / "sockets"
    sockets.mkdir(0o700)
    storage = SharedMemoryStorage(SharedMemoryStorage.Settings(directory=str(tmp_path), segment_bytes=1 << 20))
    services = Services(sockets, own=storage)
    spec = PartitionSpec("phase", {"image": ColumnSchema("uint8", (SHARED_BYTES,))}, {"train": ("image",)})
    partition = services.plane().create(spec)
    for value in range(30):
        partition.put({"image": np.full((1, SHARED_BYTES), value, np.uint8)}, once="image")
    assert partition.unit_stats()[0].nbytes == SHARED_BYTES
    assert partition.take("train", 1)[1].dense("image").max() == 0
    assert len(list(tmp_path.rglob("*segment*"))) <= 1
    services.close()


@pytest.mark.parametrize("size", [1, 2, 3])
def test_the_puts_that_lost_a_group_are_forgotten_and_no_others(size: int) -> None:
    chance = np.random.default_rng(size)
    for _ in range(50):
        puts, first = NamedPuts(size), 7 * size
        groups: dict[str, set[int]] = {}
        for number, count in enumerate(chance.integers(1, 4, 10).tolist()):
            puts.add(str(number), first, count * size)
            groups[str(number)] = set(range(first // size, first // size + count))
            first += count * size + size * int(chance.integers(0, 3))
        lost = chance.choice(first // size + 5, 4, replace=False)
        left = {name for name, made in groups.items() if not made & set(lost.tolist())}
        assert puts.forget(lost) == (len(left) < 10)
        assert set(puts.state()) == left
