"""The storage unit of a run behind its socket, and the data plane's client when a unit is lost."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.contract import Batch
from headrace.dataplane import AsyncPlane, ColumnSchema, LedgerService, Noted, PartitionLedger, PartitionSpec
from headrace.errors import LostRowsError, RunError, WireError
from headrace.registry import PluginSpec
from headrace.services.node_messages import NodeSpec
from headrace.services.storage import StorageService, StorageSetup
from headrace.wire import Network, Server
from support.desk import Peer, turns

ROWS = np.array([4, 5])
REWARD = {"reward": np.zeros(2, dtype=np.float32)}
SPEC = PartitionSpec("rl", {"reward": ColumnSchema("float32")}, {"train": ("reward",)}, 2)
KEPT = Noted()


class Plane:
    """A ledger, as the controller serves it, and storage nodes."""

    def __init__(self, directory: Path) -> None:
        self.network = Network.create(str(directory), host=None)
        self.ledger = LedgerService(connect=self.network.client)
        self.partition = PartitionLedger.make(SPEC, shard=0, number=0)
        self._server = self.network.server(self.ledger, name="controller")
        self._nodes: list[tuple[StorageService, Server]] = []

    async def start(self) -> None:
        self.address = await self._server.start()
        self.ledger.add(self.partition)
        self.client = AsyncPlane(self.address, name="test", connect=self.network.client)

    async def unit(self) -> str:
        """Another storage node; its address."""
        number = len(self._nodes)
        storage = PluginSpec(role="storage", use="memory", settings={}, directory="", origin="")
        spec = NodeSpec(
            name=f"storage-{number}",
            role="storage",
            start=0,
            controller=self.address,
            network=self.network,
            setup=msgspec.msgpack.encode(StorageSetup(storage=storage)),
        )
        service = StorageService(spec)
        server = self.network.server(*service.served, name=spec.name)
        self._nodes.append((service, server))
        address = await server.start()
        await service.reached(address)
        return address

    async def close(self) -> None:
        await self.client.close()
        for service, server in self._nodes:
            await server.close()
            await service.cancel_background()
            await service.close()
        await self._server.close()
        await self.ledger.close()


@pytest.fixture
async def plane(tmp_path: Path) -> AsyncIterator[Plane]:
    running = Plane(tmp_path)
    await running.start()
    yield running
    await running.close()


async def test_a_storage_node_is_known_to_the_ledger_when_it_serves_and_keeps_what_is_put(plane: Plane) -> None:
    await plane.unit()
    first = plane.partition.ledger.open(version=0) * 2
    rows = np.arange(first, first + 2)
    await plane.client.put("rl", REWARD, rows=rows)
    batch = await plane.client.get("rl", rows, np.ones((2, 1), np.int16), ["reward"])
    assert batch.dense("reward").tolist() == [0, 0]
    with pytest.raises(LostRowsError, match="has not all of the rows it was asked for"):
        await plane.client.get("rl", rows + 2, np.ones((2, 1), np.int16), ["reward"])


async def test_rows_of_two_units_come_back_in_order(plane: Plane) -> None:
    await plane.unit()
    await plane.unit()
    first = [plane.partition.ledger.open(version=0) * 2 for _ in range(2)]
    for start in first:
        values = np.arange(start, start + 2, dtype=np.float32)
        await plane.client.put("rl", {"reward": values}, rows=np.arange(start, start + 2))
    rows = np.concatenate([np.arange(start, start + 2) for start in reversed(first)])
    units = plane.partition.ledger.units_of(rows)
    assert len(np.unique(units)) == 2
    assert (await plane.client.get("rl", rows, units, ["reward"])).dense("reward").tolist() == rows.tolist()


async def test_a_put_waits_until_there_is_a_unit(plane: Plane) -> None:
    first = plane.partition.ledger.open(version=0) * 2
    putting = asyncio.ensure_future(plane.client.put("rl", REWARD, rows=np.arange(first, first + 2)))
    await turns()
    assert not putting.done()
    await plane.unit()
    assert (await putting).refused is None


async def test_a_unit_that_was_given_up_ends(plane: Plane, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.dataplane.unit.BEAT_SECONDS", 0.01)
    address = await plane.unit()
    plane.ledger.lose(address)
    service, _ = plane._nodes[0]
    with pytest.raises(RunError, match="given up"):
        await asyncio.wait_for(service.failed, 30)


# ---------------------------------------------------------------- a unit is lost


class Peers:
    """Clients of a ledger and two units that answer when the test says so."""

    def __init__(self) -> None:
        self.peers = {name: Peer(name) for name in ("ledger", "old", "new")}
        connect: Any = self.peers.__getitem__
        self.plane = AsyncPlane("ledger", name="test", connect=connect)

    async def puts(self, *units: str) -> asyncio.Task[Noted]:
        putting = asyncio.ensure_future(self.plane.put("rl", REWARD, rows=ROWS))
        await turns()
        await self.learns(*units)
        return putting

    async def learns(self, *units: str) -> None:
        self.peers["ledger"].answer("units", list(units))
        await turns()

    async def loses(self, unit: str) -> None:
        await self.plane.lost(unit)
        await turns()


async def test_a_put_that_was_under_way_when_its_unit_was_lost_is_made_again_at_the_next() -> None:
    around = Peers()
    putting = await around.puts("old")
    await around.loses("old")
    await around.learns("", "new")
    around.peers["new"].answer("put", KEPT)
    assert await putting is KEPT


async def test_where_another_unit_is_known_nobody_is_asked_for_one() -> None:
    around = Peers()
    putting = await around.puts("old", "new")
    await around.loses("old")
    around.peers["new"].answer("put", KEPT)
    assert await putting is KEPT


async def test_a_unit_that_comes_later_gets_its_share() -> None:
    around = Peers()
    putting = await around.puts("old")
    around.peers["old"].answer("put", KEPT)
    await putting
    around.plane.joined()
    putting = await around.puts("old", "new")
    around.peers["new"].answer("put", KEPT)
    assert await putting is KEPT


async def test_rows_of_a_unit_that_is_lost_while_it_is_asked_are_lost() -> None:
    around = Peers()
    getting = asyncio.ensure_future(around.plane.get("rl", ROWS, np.ones((2, 1), np.int16), ["reward"]))
    await turns()
    await around.learns("old")
    await around.loses("old")
    with pytest.raises(LostRowsError, match="storage unit 1 is gone"):
        await getting
    with pytest.raises(LostRowsError, match="is gone"):
        await around.plane.get("rl", ROWS, np.ones((2, 1), np.int16), ["reward"])


async def test_being_told_of_another_unit_interrupts_nothing() -> None:
    around = Peers()
    getting = asyncio.ensure_future(around.plane.get("rl", ROWS, np.ones((2, 1), np.int16), ["reward"]))
    await turns()
    await around.learns("old", "new")
    await around.loses("new")
    around.peers["old"].answer("get", Batch(rows=ROWS, columns=REWARD))
    assert (await getting).dense("reward").tolist() == [0, 0]


async def test_an_error_of_a_unit_that_is_not_lost_is_the_caller_s() -> None:
    around = Peers()
    putting = await around.puts("old")
    around.peers["old"].answer("put", WireError("refused"))
    with pytest.raises(WireError, match="refused"):
        await putting
