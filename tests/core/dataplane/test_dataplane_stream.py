"""Micro-batches of a training rank."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.contract import Ragged
from headrace.dataplane import ColumnSchema, Partition, PartitionSpec, Stream
from headrace.errors import ContractError, DeadlineError, RunError
from support.data_plane import Services, soon

SPEC = PartitionSpec("phase", {"tokens": ColumnSchema("int32", ragged=True)}, {"train": ("tokens",)}, 2, "tokens")


@pytest.fixture
def connect(services: Services) -> Callable[[], Partition]:
    services.unit()
    services.plane().create(SPEC)
    return lambda: services.plane().partition("phase")


def put(partition: Partition, groups: int, length: int = 3) -> list[int]:
    tokens = Ragged.from_arrays([np.zeros(length, np.int32)] * (2 * groups))
    rows: list[int] = partition.put({"tokens": tokens}).tolist()
    return rows


def test_a_step_has_its_groups_in_micro_batches_within_the_budget(connect: Callable[[], Partition]) -> None:
    partition = connect()
    rows = put(partition, 7)
    with Stream(connect, "train", step_groups=5, token_budget=12) as stream:
        parts = [batch.rows.tolist() for batch in stream.step()]
        assert [len(part) for part in parts] == [4, 4, 2]
        assert [row for part in parts for row in part] == rows[:10]
        stream.acknowledge()
    assert partition.stats().rows == 4


def test_a_row_is_given_while_the_rest_of_its_step_is_still_to_be_made(connect: Callable[[], Partition]) -> None:
    partition = connect()
    with Stream(connect, "train", step_groups=2) as stream:
        first = put(partition, 1)
        step = stream.step(deadline=30)
        assert next(step).rows.tolist() == first
        second = put(partition, 1)
        assert next(step).rows.tolist() == second
        assert list(step) == []


def test_what_was_not_acknowledged_is_given_again_and_what_was_is_not(connect: Callable[[], Partition]) -> None:
    partition = connect()
    rows = put(partition, 3)
    with Stream(connect, "train", step_groups=1) as stream:
        assert next(stream.step()).rows.tolist() == rows[:2]
        stream.acknowledge()
        assert next(stream.step()).rows.tolist() == rows[2:4]
    with Stream(connect, "train", step_groups=2) as stream:
        given = [row for batch in stream.step() for row in batch.rows.tolist()]
        assert sorted(given) == rows[2:]


def test_a_step_of_which_one_lease_has_ended_is_not_acknowledged_in_part(connect: Callable[[], Partition]) -> None:
    """What was made of the step is not used: its other rows must be trained again."""
    partition = connect()
    rows = put(partition, 2)
    with Stream(connect, "train", step_groups=2, token_budget=6) as stream:
        assert len(list(stream.step())) == 2
        partition.release(stream._given[1])
        with pytest.raises(RunError, match="not held"):
            stream.acknowledge()
    assert sorted(partition.lease("train", 2).rows.tolist()) == rows


def test_leases_are_extended_while_the_rank_computes(
    connect: Callable[[], Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dataplane.stream._TURN_SECONDS", 0.02)
    partition = connect()
    put(partition, 1)
    with Stream(connect, "train", step_groups=1, seconds=0.4) as stream:
        list(stream.step())
        with pytest.raises(DeadlineError):
            partition.lease("train", 1, deadline=1.0)
        stream.acknowledge()


def test_what_ends_the_fetching_is_told_to_the_rank(connect: Callable[[], Partition]) -> None:
    with Stream(connect, "nobody", step_groups=1) as stream, pytest.raises(ContractError, match="no consumer 'nobody'"):
        list(stream.step(deadline=30))


def test_a_rank_is_told_also_when_what_failed_is_keeping_its_leases(
    connect: Callable[[], Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise RunError("not held")

    monkeypatch.setattr("headrace.dataplane.stream._TURN_SECONDS", 0.02)
    monkeypatch.setattr(Partition, "extend", refuse)
    put(connect(), 4)
    with Stream(connect, "train", step_groups=1, ahead=1, seconds=0.04) as stream:
        for _ in range(2):
            with pytest.raises(RunError, match="not held"):
                steps(stream)


def steps(stream: Stream) -> None:
    while True:
        list(stream.step(deadline=20))


@pytest.mark.parametrize(("step_groups", "ahead"), [(0, 2), (1, 0), (1, -1)])
def test_a_stream_of_nothing_or_without_an_end_is_refused(
    connect: Callable[[], Partition], step_groups: int, ahead: int
) -> None:
    with (
        pytest.raises(ContractError, match="both are at least 1"),
        Stream(connect, "train", step_groups=step_groups, ahead=ahead),
    ):
        pass


def test_a_rank_does_not_wait_for_ever(connect: Callable[[], Partition]) -> None:
    with Stream(connect, "train", step_groups=1) as stream, pytest.raises(DeadlineError, match="no micro-batch"):
        list(stream.step(deadline=0.05))


def test_what_a_rank_leaves_behind_is_given_out_again_in_its_order_though_a_lease_has_ended(
    connect: Callable[[], Partition],
) -> None:
    partition = connect()
    rows = put(partition, 5)
    stream = Stream(connect, "train", step_groups=4, token_budget=6, ahead=1)
    steps = stream.step()
    for _ in range(3):
        next(steps)
    soon(lambda: partition.stats().leases == 5)
    partition.release(stream._given[1])
    stream.close()
    assert partition.lease("train", 5).rows.tolist() == [*rows[:2], *rows[4:], *rows[2:4]]


def test_what_ends_a_stream_is_not_hidden_by_a_ledger_that_does_not_answer(
    connect: Callable[[], Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    put(connect(), 1)

    def release(*_: object, **__: object) -> None:
        raise DeadlineError("nobody answers")

    def train() -> None:
        with Stream(connect, "train", step_groups=1) as stream:
            next(stream.step())
            monkeypatch.setattr(stream._desk, "release", release)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()


def test_a_step_that_met_its_deadline_goes_on_with_what_it_lacks(connect: Callable[[], Partition]) -> None:
    partition = connect()
    rows = put(partition, 2)
    with Stream(connect, "train", step_groups=4) as stream:
        step = stream.step(deadline=0.2)
        given = next(step).rows.tolist()
        with pytest.raises(DeadlineError):
            given += [row for batch in step for row in batch.rows.tolist()]
        rows += put(partition, 6)
        given += [row for batch in stream.step() for row in batch.rows.tolist()]
        assert given == rows[:8]
        stream.acknowledge()
        assert [row for batch in stream.step() for row in batch.rows.tolist()] == rows[8:]


def test_no_lease_of_a_step_that_failed_is_acknowledged_with_a_later_one(connect: Callable[[], Partition]) -> None:
    partition = connect()
    rows = put(partition, 2)
    with Stream(connect, "train", step_groups=2, token_budget=6) as stream:
        assert len(list(stream.step())) == 2
        partition.release(stream._given[0])
        with pytest.raises(RunError):
            stream.acknowledge()
        stream.acknowledge()
    assert sorted(partition.lease("train", 2).rows.tolist()) == rows


def test_a_stream_whose_lease_ended_says_to_make_another(
    connect: Callable[[], Partition], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.dataplane.stream._TURN_SECONDS", 0.02)
    partition = connect()
    put(partition, 1)
    with Stream(connect, "train", step_groups=1, seconds=1.0) as stream:
        list(stream.step())
        partition.release(stream._given[0])
        list(stream.step())  # the same row on another lease
        with pytest.raises(RunError, match="make another Stream"):
            list(stream.step(deadline=30))
