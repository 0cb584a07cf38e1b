"""A consumer in an event loop: what it holds it either finishes or gives back, also when it is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Ragged, Storage
from headrace.dataplane import AsyncConsumer, AsyncPlane, ColumnSchema, LedgerService, PartitionSpec
from headrace.dataplane.messages import Put, StatsCall
from headrace.dataplane.shared import SHARED_BYTES
from headrace.dataplane.shared_unit import unit_service
from headrace.errors import LostRowsError, RunError
from headrace.wire import Client, Server, ipc_address
from headrace_storage.memory import MemoryStorage
from headrace_storage.shared_memory import SharedMemoryStorage

SPEC = PartitionSpec(
    "rl",
    {"tokens": ColumnSchema("int32", ragged=True), "logprobs": ColumnSchema("float32", ragged=True)},
    {"reference": ("tokens",), "train": ("tokens", "logprobs")},
    2,
    "tokens",
    {"reference": ("logprobs",)},
    ("reference",),
)


class Served:
    """A ledger that is a storage unit too, and the consumer ``reference``."""

    def __init__(self, address: str, ledger: LedgerService) -> None:
        self.ledger = ledger
        self.address = address
        self.plane = AsyncPlane(address, name="reference.0", connect=Client)
        self.client = Client(address)
        self.consumer = AsyncConsumer(self.plane, self.client, partition="rl", consumer="reference", reads=("tokens",))

    async def put(self, *lengths: int) -> None:
        tokens = Ragged.from_arrays([np.arange(length, dtype=np.int32) for length in lengths])
        address = (await self.client.call("units", reply=list[str], deadline=5.0))[0]
        client = Client(address)
        await client.submit("put", Put("rl", None, {"tokens": tokens}, 0), reply=object, deadline=5.0)
        await client.close()

    async def finish(self, rows: np.ndarray, tokens: Ragged) -> None:
        logprobs = tokens.like(np.zeros(len(tokens.values), np.float32))
        await self.plane.put("rl", {"logprobs": logprobs}, rows=rows)

    def ready(self, consumer: str) -> int:
        return self.ledger.stats(StatsCall("rl")).ready[consumer]


@asynccontextmanager
async def served(folder: Path, storage: Storage | None = None) -> AsyncIterator[Served]:
    address = ipc_address(str(folder), "ledger")
    ledger = LedgerService(connect=Client)
    unit = unit_service(storage or MemoryStorage(None), ledger=ledger)
    server = Server(ledger, unit, address=address)
    ledger.add_own(unit, await server.start())
    ledger.create(SPEC)
    all = Served(address, ledger)
    try:
        yield all
    finally:
        await all.plane.close()
        await all.client.close()
        await server.close()
        await unit.close()
        await ledger.close()


async def test_rows_come_as_they_are_ready_up_to_a_budget_and_are_done_when_their_columns_are_there(
    tmp_path: Path,
) -> None:
    async with served(tmp_path) as there:
        await there.put(3, 3, 3, 3)
        async with there.consumer.leased(100, tokens=9) as batch:
            assert len(batch) == 3
            await there.finish(batch.rows, batch.ragged("tokens"))
        assert (there.ready("reference"), there.ready("train")) == (1, 1)
        async with there.consumer.leased(100, tokens=9) as batch:
            await there.finish(batch.rows, batch.ragged("tokens"))
        assert (there.ready("reference"), there.ready("train")) == (0, 2)


async def test_a_consumer_that_waits_gets_what_is_put_then(tmp_path: Path) -> None:
    async with served(tmp_path) as there:

        async def take() -> int:
            async with there.consumer.leased(100, tokens=9) as batch:
                return len(batch)

        taken, _ = await asyncio.gather(take(), there.put(1, 1))
        assert taken == 2


async def test_what_a_consumer_held_when_it_failed_is_given_out_again(tmp_path: Path) -> None:
    async with served(tmp_path) as there:
        await there.put(1, 1)
        with pytest.raises(LostRowsError):
            async with there.consumer.leased(100, tokens=9):
                raise LostRowsError("a storage unit is gone")
        assert there.ready("reference") == 2


async def test_what_a_lost_consumer_held_is_its_successors_but_for_what_it_had_written(tmp_path: Path) -> None:
    async with served(tmp_path) as there:
        await there.put(1, 1, 1, 1)

        async def lost_half_way() -> None:
            async with there.consumer.leased(100, tokens=3) as batch:
                await there.finish(batch.rows[:1], batch.take(np.array([0])).ragged("tokens"))
                there.ledger.forsake("reference")
                assert there.ready("reference") == 3
                async with there.consumer.leased(100, tokens=9) as again:
                    assert again.rows[:2].tolist() == batch.rows[1:].tolist()
                    await there.finish(again.rows, again.ragged("tokens"))

        with pytest.raises(RunError, match="is not held"):  # whoever was given up is told when it is done
            await lost_half_way()
        assert (there.ready("reference"), there.ready("train")) == (0, 2)


LONG = SHARED_BYTES // 4


def shared_storage(folder: Path) -> SharedMemoryStorage:
    return SharedMemoryStorage(SharedMemoryStorage.Settings(directory=str(folder), segment_bytes=1 << 20))


async def test_what_is_held_is_read_where_it_lies_in_shared_memory_without_a_copy(tmp_path: Path) -> None:
    async with served(tmp_path, shared_storage(tmp_path)) as there:
        await there.put(LONG, LONG)
        async with there.consumer.leased(100, tokens=9 * LONG) as batch:
            units = np.ones((2, 1), np.int16)
            again = await there.plane.get("rl", batch.rows, units, ("tokens",), held=True)
            other = await there.plane.get("rl", batch.rows, units, ("tokens",))
            values = batch.ragged("tokens").values
            assert values.tolist() == [*range(LONG)] * 2
            assert np.shares_memory(values, again.ragged("tokens").values)
            assert not values.flags.writeable
            assert not np.shares_memory(values, other.ragged("tokens").values), "what is not held may leave"
            assert other.ragged("tokens").values.tolist() == values.tolist()


async def test_shared_memory_that_cannot_be_mapped_is_read_by_message(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError("too many open files")

    monkeypatch.setattr("headrace.dataplane.shared.Segments._mapped", refuse)
    async with served(tmp_path, shared_storage(tmp_path)) as there:
        await there.put(LONG, LONG)
        async with there.consumer.leased(100, tokens=9 * LONG) as batch:
            assert batch.ragged("tokens").values.tolist() == [*range(LONG)] * 2


async def test_what_a_lost_unit_shared_is_let_go_and_what_was_read_stays(tmp_path: Path) -> None:
    async with served(tmp_path, shared_storage(tmp_path)) as there:
        await there.put(LONG, LONG)
        async with there.consumer.leased(100, tokens=9 * LONG) as batch:
            (mapped,) = there.plane._segments.values()
            assert mapped is not None
            await there.plane.lost(there.address)
            assert mapped._lock.closed
            assert batch.ragged("tokens").values.tolist() == [*range(LONG)] * 2
