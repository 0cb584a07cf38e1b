"""What went wrong is told to whoever can mend it, with what to do, in their words and not in those of the internals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, DataPlane, Partition, PartitionSpec
from headrace.errors import ContractError, DeadlineError, LostRowsError, RunError
from headrace.wire import BlockingClient, Limits
from support.data_plane import Services
from support.plane_world import World

COLUMNS = {"tokens": ColumnSchema("int32", ragged=True)}


def spec(name: str = "phase") -> PartitionSpec:
    return PartitionSpec(name, COLUMNS, {"score": ("tokens",)})


@pytest.fixture
def partition(world: World) -> Partition:
    world.unit()
    return world.plane().create(spec())


def tokens(*answers: list[int]) -> Any:
    return {"tokens": Ragged.from_arrays([np.array(answer, np.int32) for answer in answers])}


@pytest.mark.parametrize("shards", [1, 2])
def test_a_lease_is_of_the_partition_that_gave_it(shards: int) -> None:
    world = World(shards=shards)
    world.unit()
    partition, other = world.plane().create(spec()), world.plane().create(spec("other"))
    partition.put(tokens([1]))
    held = partition.lease("score", 1)
    for use in (other.get, other.acknowledge, other.release, other.extend):
        with pytest.raises(ContractError, match="a lease of partition 'phase' was given to partition 'other'"):
            use(held)
        with pytest.raises(ContractError, match="NoneType in the place of a lease"):
            use(None)  # type: ignore[arg-type]
    assert partition.get(held).ragged("tokens")[0].tolist() == [1]
    world.close()


def test_what_was_removed_is_not_called_lost(world: World, partition: Partition) -> None:
    partition.put(tokens([1]))
    held = partition.lease("score", 1)
    world.plane().remove("phase")
    world.settle()
    with pytest.raises(ContractError, match="no partition 'phase'"):
        partition.get(held)


def test_a_value_that_is_too_large_to_send_is_named(services: Services, monkeypatch: pytest.MonkeyPatch) -> None:
    services.unit()
    limits = Limits(frame_bytes=1 << 20)
    monkeypatch.setattr("headrace.dataplane.asking.DEFAULT_LIMITS", limits)
    plane = DataPlane(services.ledger, connect=lambda address: BlockingClient(address, limits=limits))
    partition = plane.create(spec())
    with pytest.raises(ContractError, match=r"a put has 1,048,580 bytes of column 'tokens'; at most 1,048,576") as told:
        partition.put(tokens([0] * ((1 << 18) + 1)))
    assert "cut values" in told.value.fix
    assert partition.put(tokens([0] * (1 << 18))).tolist()
    plane.close()


def test_who_waits_in_vain_is_told_how_many_there_were_and_what_to_do(world: World, partition: Partition) -> None:
    for version in (1, 1, 5):
        partition.put(tokens([1]), version=version)
    for newer, words in ((0, "3 were ready"), (5, "1 of policy version 5 or later were ready")):
        with pytest.raises(DeadlineError, match=f"there were no 50 groups of partition 'phase' .*: {words}") as told:
            partition.lease("score", 50, min_version=newer, deadline=1)
        assert "at_least=1" in told.value.fix


def test_of_several_ledgers_who_waits_in_vain_is_told_how_many_there_were_in_all() -> None:
    world = World(shards=2)
    world.unit()
    partition = world.plane().create(spec())
    for _ in range(3):
        partition.put(tokens([1]))
    with pytest.raises(DeadlineError, match=r"there were no 50 .* within 1 s: 3 were ready"):
        partition.lease("score", 50, deadline=1)
    world.close()


def test_a_snapshot_that_cannot_be_written_or_read_says_what_to_do_about_it(world: World, tmp_path: Path) -> None:
    world.unit()
    plane = world.plane()
    for path, fix in ((tmp_path / "no" / "file", f"make the folder {tmp_path / 'no'}"), (tmp_path, "is a folder")):
        with pytest.raises(RunError, match="cannot be written") as told:
            plane.snapshot(path)
        assert fix in told.value.fix
    with pytest.raises(RunError, match="cannot be read: No such file or directory") as told:
        plane.restore(tmp_path / "none")
    assert told.value.fix == "name a file that is there, and that this user may read"


def test_rows_that_have_left_are_named_as_their_reader_knows_them(partition: Partition) -> None:
    partition.put(tokens([1]))
    held = partition.lease("score", 1)
    partition.acknowledge(held)
    said = r"has not all of the rows it was asked for: rows 1 of partition 'phase', with tokens"
    with pytest.raises(LostRowsError, match=said) as told:
        partition.get(held)
    assert "before their lease ends" in told.value.fix
