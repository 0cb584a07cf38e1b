"""Consumers that wait, are fast, slow, many or dead."""

from __future__ import annotations

import asyncio
import heapq
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import numpy as np
import pytest

from headrace.dataplane import ColumnSchema, Partition, PartitionSpec
from headrace.dataplane.messages import Granted, LeaseCall, Noted, Put
from headrace.dataplane.shared import SHARED_BYTES
from headrace.dataplane.waiting import Waiting
from headrace.errors import DeadlineError, SilenceError
from headrace.wire import BlockingClient
from headrace_storage.shared_memory import SharedMemoryStorage
from support.data_plane import Services, soon
from support.plane_world import LEDGER, World

SPEC = PartitionSpec("phase", {"reward": ColumnSchema("float32")}, {"train": ("reward",)})
PATIENCE = 60.0


@pytest.fixture
def partition(services: Services) -> Partition:
    services.unit()
    return services.plane().create(SPEC)


def put(partition: Partition, count: int) -> list[int]:
    rows: list[int] = partition.put({"reward": np.zeros(count, np.float32)}).tolist()
    return rows


def ask(groups: int, *, seconds: float = PATIENCE) -> LeaseCall:
    return LeaseCall("phase", "train", groups, groups, PATIENCE, seconds)


@contextmanager
def clients(services: Services, count: int) -> Iterator[list[BlockingClient]]:
    made = [BlockingClient(services.ledger) for _ in range(count)]
    try:
        yield made
    finally:
        for client in made:
            client.close()


class Turns:
    """Threads on a clock of their own: the one whose turn comes first goes first, the others stand still."""

    def __init__(self, threads: int) -> None:
        self._moved = threading.Condition()
        self._due: list[tuple[float, int]] = []
        self._threads = threads

    def wait(self, thread: int, until: float) -> None:
        """Returns at this thread's ``until``, when all others have said how long they wait."""
        with self._moved:
            heapq.heappush(self._due, (until, thread))
            self._moved.notify_all()
            assert self._moved.wait_for(
                lambda: len(self._due) == self._threads and self._due[0] == (until, thread), timeout=PATIENCE
            )
            heapq.heappop(self._due)

    def leave(self) -> None:
        with self._moved:
            self._threads -= 1
            self._moved.notify_all()


def test_AFL_10_a_consumer_twice_as_fast_gets_twice_the_rows(services: Services, partition: Partition) -> None:
    paces, rows = {0: 1.0, 1: 2.0, 2: 2.0}, 400
    put(partition, rows)
    turns, given = Turns(len(paces)), Counter[int]()

    def consume(number: int) -> None:
        mine, now = services.plane().partition("phase"), paces[number] * 0.001 * number
        while True:
            turns.wait(number, now)
            try:
                held = mine.lease("train", 1, deadline=1e-3)
            except DeadlineError:
                break
            mine.acknowledge(held)
            given[number] += len(held)
            now += paces[number]
        turns.leave()

    threads = [threading.Thread(target=consume, args=(number,)) for number in paces]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)
    assert sum(given.values()) == rows
    assert given[0] == pytest.approx(rows / 2, abs=2)
    assert given[1] == pytest.approx(rows / 4, abs=2)


def test_thousands_that_wait_through_a_few_sockets_are_all_answered_smallest_first(
    services: Services, partition: Partition
) -> None:
    chance = Random(0)
    sizes = [chance.randint(1, 6) for _ in range(3000)]
    with clients(services, 5) as sockets:
        sent = [
            (size, sockets[place % 5], sockets[place % 5].send("lease", ask(size), deadline=2 * PATIENCE))
            for place, size in enumerate(sizes)
        ]
        until_waiting(partition, len(sizes))
        left = sum(sizes)
        while left:
            left -= len(put(partition, min(left, chance.choice([1, 7, 400]))))
        granted = [(size, client.receive(call, Granted)) for size, client, call in sent]
    assert [found.rows.shape[1] for _, found in granted] == sizes
    in_order = [size for size, _ in sorted(granted, key=lambda pair: pair[1].lease)]
    assert in_order == sorted(in_order)
    rows = np.concatenate([found.rows[0] for _, found in granted])
    assert len(np.unique(rows)) == sum(sizes), "no row was given twice"
    assert partition.stats().waiting == {"train": 0}


def until_waiting(partition: Partition, count: int) -> None:
    """What was sent through one socket is heard in its order, what comes through several is not."""
    soon(lambda: partition.stats().waiting["train"] == count)


def test_one_that_died_while_it_waited_holds_nobody_up(
    services: Services, partition: Partition, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its socket is closed without a word. What it is given comes back when its lease ends."""
    monkeypatch.setattr("headrace.dataplane.ledger.WATCH_SECONDS", 0.02)
    count = 50
    with clients(services, 1) as (dying,):
        for _ in range(count):
            dying.send("lease", ask(1, seconds=0.05), deadline=PATIENCE)
        until_waiting(partition, count)
    with clients(services, 1) as (living,):
        sent = [living.send("lease", ask(1), deadline=PATIENCE) for _ in range(count)]
        until_waiting(partition, 2 * count)
        rows = put(partition, count)
        granted = [living.receive(call, Granted) for call in sent]
    assert sorted(row for found in granted for row in found.rows[0].tolist()) == rows
    assert partition.stats().leases == count


def test_one_that_gave_up_waiting_for_much_holds_nobody_up(services: Services, partition: Partition) -> None:
    with clients(services, 1) as (client,):
        given_up = client.send("lease", LeaseCall("phase", "train", 1, 1, 0.01, PATIENCE), deadline=PATIENCE)
        with pytest.raises(DeadlineError):
            client.receive(given_up, Granted)
        patient = client.send("lease", ask(2), deadline=PATIENCE)
        rows = put(partition, 2)
        assert client.receive(patient, Granted).rows[0].tolist() == rows


# ---------------------------------------------------------------- on a clock of their own


def wait_for(world: World, groups: int, *, wait: float = PATIENCE, min_version: int = 0) -> asyncio.Future[Granted]:
    call = LeaseCall("phase", "train", groups, groups, wait, PATIENCE, 0, min_version)
    answer = world.client(LEDGER).submit("lease", call, reply=Granted, deadline=2 * PATIENCE)
    world.settle()
    return answer


def test_one_that_waits_for_versions_to_come_does_not_hold_up_those_that_take_any(world: World) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    newest = [wait_for(world, 1, min_version=10) for _ in range(2)]
    more, newer = wait_for(world, 2), wait_for(world, 1, min_version=5)
    rows = put(partition, 2)
    assert more.result().rows[0].tolist() == rows
    partition.put({"reward": np.zeros(1, np.float32)}, version=7)
    assert newer.done()
    assert partition.stats().waiting == {"train": 2}
    partition.put({"reward": np.zeros(2, np.float32)}, version=10)
    assert [answer.done() for answer in newest] == [True, True]
    assert partition.stats().waiting == {"train": 0}


def test_only_those_that_still_wait_are_counted(world: World) -> None:
    world.unit()
    partition = world.plane().create(SPEC)
    patient = wait_for(world, 4)
    for _ in range(5):
        with pytest.raises(DeadlineError):
            partition.lease("train", 5, deadline=1e-6)
    assert partition.stats().waiting == {"train": 1}
    rows = put(partition, 4)
    assert patient.result().rows[0].tolist() == rows
    assert partition.stats().waiting == {"train": 0}


async def test_those_that_gave_up_behind_one_that_waits_are_forgotten() -> None:
    waiting = Waiting(lambda _: {})
    patient = waiting.add(ask(1))
    for number in range(1000):
        waiting.add(ask(2 + number % 3)).cancel()
        await asyncio.sleep(0)
    assert len(waiting) == 1
    assert sum(map(len, waiting._heaps.values())) < 100
    patient.cancel()


def test_first_columns_of_rows_wait_for_room_and_further_ones_never_do(world: World) -> None:
    unit = world.unit(capacity=16)
    spec = PartitionSpec(
        "run", {"a": ColumnSchema("float64"), "b": ColumnSchema("float64")}, {"train": ("a", "b")}, group_size=2
    )
    partition = world.plane().create(spec)
    rows = partition.put({"a": np.zeros(2)})
    fresh = world.say(unit, "put", Put("run", rows, {"b": np.ones(2)}, 0, fresh=True), Noted)
    assert not fresh.answer.done()
    other = partition.put({"b": np.zeros(2)}, rows=rows, deadline=1)
    assert other.tolist() == rows.tolist()
    assert partition.stats().rows == 2
    partition.acknowledge(partition.lease("train", 1))
    assert world.outcome(fresh).refused.tolist() == [2, 2], "late: it heard when there was room, and not before"


def test_what_a_consumer_waited_for_that_is_gone_is_the_next_ones_at_once(
    services: Services, partition: Partition
) -> None:
    gone = BlockingClient(services.ledger)
    gone.send("lease", ask(1), deadline=PATIENCE)
    soon(lambda: partition.stats().waiting["train"] == 1)
    gone.close()
    services.plane().partition("phase").stats()  # by a connection made since: the ledger has heard of the other's end
    rows = put(partition, 1)
    held, _ = partition.take("train", 1, deadline=10)
    assert held.rows.tolist() == rows


@pytest.mark.parametrize("where", ["sent", "placed"])
def test_a_put_that_finds_no_room_in_time_is_told_that_the_unit_is_full_and_is_not_kept(
    services: Services, where: str
) -> None:
    values = np.zeros(SHARED_BYTES, np.float32)
    services.unit(
        capacity=values.nbytes,
        storage=SharedMemoryStorage(SharedMemoryStorage.Settings()) if where == "placed" else None,
    )
    partition = services.plane().create(SPEC)
    partition.put({"reward": values})
    with pytest.raises(DeadlineError, match=r"unit 1 is full, 262,144 of 262,144 bytes.*; 1 puts wait") as told:
        partition.put({"reward": values}, deadline=0.5)
    assert not isinstance(told.value, SilenceError)
    assert "acknowledge or drop" in told.value.fix
    partition.drop(range(1, 1 + len(values)))
    partition.put({"reward": values}, deadline=30)
    assert partition.stats().rows == len(values)


@pytest.mark.parametrize("wait", [float("nan"), float("inf"), -1.0, 1e300])
def test_a_wait_for_room_that_is_no_time_ends_with_the_call(world: World, wait: float) -> None:
    unit = world.unit(capacity=4)
    partition = world.plane().create(SPEC)
    put(partition, 1)
    waiting = world.say(unit, "put", Put("phase", None, {"reward": np.zeros(1, np.float32)}, 0, wait=wait), Noted)
    world.wait(10.0)
    assert not waiting.answer.done()
    partition.drop([1])
    world.wait(1.0)
    assert waiting.answer.done()
