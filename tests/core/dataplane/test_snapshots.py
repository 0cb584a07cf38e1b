"""What a snapshot holds, and when it is refused; ``test_plane_machine.py`` compares what comes back with a model."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec, snapshot
from headrace.dataplane.messages import Frozen, Join, Share
from headrace.errors import ContractError, DeadlineError, LostRowsError, RunError
from support.plane_world import LEDGER, World

AT_ONCE = 1e-6
SPEC = PartitionSpec(
    "phase",
    {"tokens": ColumnSchema("int32", ragged=True), "reward": ColumnSchema("float32")},
    {"score": ("tokens",), "train": ("tokens", "reward")},
    1,
    "tokens",
)


def put(partition: Partition, count: int, **told: Any) -> list[int]:
    tokens = Ragged.from_arrays([np.arange(5, dtype=np.int32)] * count)
    return partition.put({"tokens": tokens, "reward": np.ones(count, np.float32)}, **told).tolist()


def fresh(units: int = 1, **told: Any) -> World:
    world = World(**told)
    for _ in range(units):
        world.unit()
    return world


@pytest.fixture
def worlds() -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def begin(*args: Any, **told: Any) -> World:
        if made:
            made.pop().close()
        made.append(fresh(*args, **told))
        return made[-1]

    yield begin
    made.pop().close()


def test_rows_that_are_acknowledged_while_it_is_written_are_in_it(
    worlds: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is one moment of the ledger: units delete nothing that it names until it is read."""
    world = worlds(2)
    partition = world.plane().create(SPEC)
    rows = put(partition, 6)
    reads = snapshot._write

    def meanwhile(*args: Any) -> None:
        for consumer in SPEC.consumers:
            partition.acknowledge(partition.lease(consumer, 4))
        put(partition, 3)
        world.settle()
        reads(*args)

    monkeypatch.setattr(snapshot, "_write", meanwhile)
    world.plane().snapshot(tmp_path / "file")
    world.settle()
    assert sum(storage.stats().rows for storage in world.storages.values()) == 5, "what left is deleted then"
    again = worlds(1)
    again.plane().restore(tmp_path / "file")
    partition = again.plane().partition("phase")
    for consumer in SPEC.consumers:
        assert partition.lease(consumer, 9, at_least=1).rows.tolist() == rows


def test_units_go_on_deleting_when_whoever_wrote_one_is_gone(worlds: Callable[..., World]) -> None:
    world = worlds(1)
    partition = world.plane().create(SPEC)
    put(partition, 4)
    frozen = world.outcome(world.say(LEDGER, "freeze", 5.0, Frozen))
    for consumer in SPEC.consumers:
        partition.acknowledge(partition.lease(consumer, 4))
    world.wait(4)
    assert world.storages["unit-1"].stats().rows == 4
    world.wait(2)
    assert world.storages["unit-1"].stats().rows == 0
    with pytest.raises(RunError, match="did not keep what a snapshot names"):
        world.outcome(world.say(LEDGER, "thaw", frozen.hold))


def test_one_that_outlives_its_deadline_is_not_there(
    worlds: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(1)
    put(world.plane().create(SPEC), 2)
    reads = snapshot._write

    def slow(*args: Any) -> None:
        reads(*args)
        world.wait(11)

    monkeypatch.setattr(snapshot, "_write", slow)
    with pytest.raises(DeadlineError, match="later deadline"):
        world.plane().snapshot(tmp_path / "file", deadline=10.0)
    assert list(tmp_path.iterdir()) == []


def test_a_unit_that_dies_meanwhile_costs_the_snapshot_and_not_the_rows_of_others(
    worlds: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = worlds(2)
    partition = world.plane().create(SPEC)
    put(partition, 2)
    left = put(partition, 2)
    world.lose("unit-1")
    with pytest.raises(LostRowsError, match="values that a snapshot names") as lost:
        world.plane().snapshot(tmp_path / "file")
    assert "take the snapshot again" in lost.value.fix
    assert list(tmp_path.iterdir()) == []
    world.plane().snapshot(tmp_path / "file")
    again = worlds(1)
    again.plane().restore(tmp_path / "file")
    assert again.plane().partition("phase").lease("train", 9, at_least=1).rows.tolist() == left


def test_a_damaged_file_restores_nothing_and_says_what_to_do(worlds: Callable[..., World], tmp_path: Path) -> None:
    world = worlds(1)
    put(world.plane().create(SPEC), 40)
    file = tmp_path / "file"
    world.plane().snapshot(file)
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[: len(whole) // 2], whole[:-40] + bytes([whole[-40] ^ 4]) + whole[-39:]):
        file.write_bytes(damaged)
        again = worlds(1)
        with pytest.raises(RunError, match="is damaged or cut") as refused:
            again.plane().restore(file)
        assert refused.value.fix == "use an older one, or a copy of it"
        with pytest.raises(ContractError, match="there are: none yet"):
            again.plane().partition("phase")
    file.write_bytes(whole)
    again.plane().restore(file)
    assert again.plane().partition("phase").stats().rows == 40


def test_a_disk_that_is_full_leaves_the_last_one(
    worlds: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = worlds(1).plane()
    partition = plane.create(SPEC)
    put(partition, 1)
    plane.snapshot(tmp_path / "file")
    last = (tmp_path / "file").read_bytes()
    put(partition, 1)

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(RunError, match=r"file cannot be written: No space left on device"):
        plane.snapshot(tmp_path / "file")
    assert [path.read_bytes() for path in tmp_path.iterdir()] == [last]


def test_it_is_restored_before_anything_else(worlds: Callable[..., World], tmp_path: Path) -> None:
    plane = worlds(1).plane()
    partition = plane.create(SPEC)
    put(partition, 2)
    plane.snapshot(tmp_path / "file")
    with pytest.raises(ContractError, match="has partitions already: phase"):
        plane.restore(tmp_path / "file")
    assert partition.stats().rows == 2


def test_while_it_is_restored_nothing_else_is_taken_and_nobody_is_served(
    worlds: Callable[..., World], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plane = worlds(2).plane()
    partition = plane.create(SPEC)
    rows = [put(partition, 3, version=1), put(partition, 3, version=0)]
    plane.snapshot(tmp_path / "file")
    world = worlds(2)
    puts, waiting = snapshot._put, []

    def meanwhile(*args: Any) -> None:
        partition = world.plane().partition("phase")
        with pytest.raises(RunError, match="is being restored"):
            put(partition, 1)
        with pytest.raises(RunError, match="is being restored"):
            partition.put({"reward": np.ones(1, np.float32)}, rows=np.array([rows[1][-1] + 9]))
        with pytest.raises(DeadlineError):
            partition.lease("train", 1, deadline=AT_ONCE)
        with pytest.raises(RunError, match="is being restored and not whole yet"):
            world.plane().snapshot(tmp_path / "another")
        if not waiting:
            partition.drop([rows[0][0]])
        waiting.append(1)
        puts(*args)

    monkeypatch.setattr(snapshot, "_put", meanwhile)
    world.plane().restore(tmp_path / "file")
    assert len(waiting) > 1
    partition = world.plane().partition("phase")
    given = partition.lease("train", 6, at_least=5).rows.tolist()
    assert given == rows[1] + rows[0][1:], "the oldest version first, and nothing that was dropped meanwhile"
    assert put(partition, 1)[0] == rows[1][-1] + 1, "ids go on where they were"


def test_more_units_share_what_comes_back(worlds: Callable[..., World], tmp_path: Path) -> None:
    plane = worlds(1).plane()
    put(plane.create(SPEC), 30)
    plane.snapshot(tmp_path / "file")
    world = worlds(3)
    world.plane().restore(tmp_path / "file")
    assert [storage.stats().rows for storage in world.storages.values()] == [10, 10, 10]


def test_a_late_word_about_a_lease_of_before_is_refused(worlds: Callable[..., World], tmp_path: Path) -> None:
    plane = worlds(1).plane()
    partition = plane.create(SPEC)
    put(partition, 2)
    plane.snapshot(tmp_path / "file")
    before = partition.lease("train", 1)
    world = worlds(1)
    world.plane().restore(tmp_path / "file")
    partition = world.plane().partition("phase")
    partition.lease("train", 1)
    with pytest.raises(RunError, match="is not held"):
        partition.acknowledge(before)


def test_ranks_go_on_with_the_first_batch_that_not_all_had_acknowledged(
    worlds: Callable[..., World], tmp_path: Path
) -> None:
    plane = worlds(1).plane()
    partition = plane.create(SPEC)
    rows = put(partition, 8)
    for batch in (0, 1):
        held = [partition.lease("train", 2, share=Share(batch, rank, 2)) for rank in (0, 1)]
        for part in held[: 2 - batch]:
            partition.acknowledge(part)
    plane.snapshot(tmp_path / "file")
    world = worlds(1)
    world.plane().restore(tmp_path / "file")
    partition = world.plane().partition("phase")
    assert partition.first_batch("train") == 1
    again = [partition.lease("train", 2, share=Share(1, rank, 2)).rows.tolist() for rank in (0, 1)]
    assert sorted(again[0] + again[1]) == rows[2:4]


def test_partitions_that_come_after_a_restore_have_rows_of_their_own(
    worlds: Callable[..., World], tmp_path: Path
) -> None:
    """Also when partitions had been removed before, so that there are fewer than there ever were."""
    plane = worlds(1).plane()
    specs = [msgspec.structs.replace(SPEC, name=name) for name in ("first", "second", "third")]
    for spec in specs:
        put(plane.create(spec), 2)
    plane.remove("first")
    plane.remove("second")
    plane.snapshot(tmp_path / "file")
    plane = worlds(1).plane()
    plane.restore(tmp_path / "file")
    third = plane.partition("third")
    others = [row for spec in specs[:2] for row in put(plane.create(spec), 2, version=7)]
    held = third.lease("train", 9, at_least=1).rows.tolist()
    assert len(held) == 2
    assert not set(held) & set(others)
    assert third.stats().rows == 2


def test_what_a_stage_had_written_is_not_given_to_it_again(worlds: Callable[..., World], tmp_path: Path) -> None:
    """Nor is a row that it had acknowledged; one that it held is, whole groups or not."""
    spec = PartitionSpec("phase", SPEC.columns, SPEC.consumers, 2, "tokens", {"score": ("reward",)}, by_row=("score",))
    plane = worlds(2).plane()
    partition = plane.create(spec)
    tokens = Ragged.from_arrays([np.arange(5, dtype=np.int32)] * 6)
    rows = partition.put({"tokens": tokens})
    held = partition.lease("score", 4)
    partition.put({"reward": np.ones(3, np.float32)}, rows=held.rows[:3])
    partition.acknowledge(partition.lease("score", 1))
    plane.snapshot(tmp_path / "file")
    world = worlds(1)
    world.plane().restore(tmp_path / "file")
    partition = world.plane().partition("phase")
    assert partition.stats().ready == {"score": 2, "train": 1}
    again = partition.lease("score", 9, at_least=2)
    assert (again.rows.tolist(), again.attempts.tolist()) == ([rows[3], rows[5]], [2, 1])
    partition.put({"reward": np.ones(3, np.float32)}, rows=rows[3:])
    assert partition.lease("train", 3).rows.tolist() == rows.tolist()


def test_a_unit_that_outlives_its_ledger_ends(worlds: Callable[..., World]) -> None:
    """Its values are of rows that the next ledger gives to others."""
    world = worlds(0)
    again = Join("unit-1", "somebody", again=True)
    with pytest.raises(RunError, match="knows nothing of the storage unit at unit-1"):
        world.outcome(world.say(LEDGER, "join", again, int))


def test_a_file_of_another_kind_is_refused(worlds: Callable[..., World], tmp_path: Path) -> None:
    from headrace.wire import RecordWriter

    plane = worlds(1).plane()
    for head, message in ((snapshot.Head(7, [0]), "has format 7, expected 1"), ("words", "is whole and no snapshot")):
        with RecordWriter(tmp_path / "file") as writer:
            writer.write(head)
            writer.commit()
        with pytest.raises(RunError, match=message):
            plane.restore(tmp_path / "file")
