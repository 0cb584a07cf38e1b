"""The storage unit behind its socket, and its client when the unit is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.contract import Batch, StorageStats
from headrace.errors import LostRowsError, WireError
from headrace.registry import PluginSpec
from headrace.services.messages import NodeSpec
from headrace.services.storage import Columns, Rows, StorageClient, StorageService, StorageSetup
from headrace.wire import Network
from support.desk import Peer, turns

BATCH = Batch(rows=np.array([4, 5]), columns={"reward": np.zeros(2, dtype=np.float32)})


def service(directory: Path) -> StorageService:
    storage = PluginSpec(role="storage", use="memory", settings={}, directory="", origin="")
    spec = NodeSpec(
        name="storage-0",
        role="storage",
        start=0,
        controller="",
        network=Network.create(str(directory), host=None),
        setup=msgspec.msgpack.encode(StorageSetup(storage=storage)),
    )
    return StorageService(spec)


async def test_rows_that_a_unit_does_not_have_are_named_as_lost(tmp_path: Path) -> None:
    unit = service(tmp_path)
    await unit.put(BATCH)
    with pytest.raises(LostRowsError, match="has not all of the rows it was asked for: row 6"):
        await unit.get(Columns(rows=[4, 6], columns=["reward"]))


async def test_an_empty_unit_has_lost_whatever_it_is_asked_for(tmp_path: Path) -> None:
    with pytest.raises(LostRowsError, match="has not all of the rows"):
        await service(tmp_path).get(Columns(rows=[4], columns=["reward"]))


async def test_rows_that_another_unit_had_are_freed_without_a_word(tmp_path: Path) -> None:
    unit = service(tmp_path)
    await unit.put(BATCH)
    await unit.delete(Rows(rows=[1, 4]))
    assert (await unit.stats(None)).rows == 1


def client() -> tuple[StorageClient, dict[str, Peer]]:
    peers = {name: Peer(name) for name in ("old", "new", "newest")}
    return StorageClient("old", connect=peers.__getitem__), peers  # type: ignore[arg-type]  # calls only


async def test_a_put_that_was_under_way_when_its_unit_was_lost_is_made_again_at_the_next() -> None:
    storage, peers = client()
    putting = asyncio.ensure_future(storage.put(BATCH))
    await turns()
    await storage.moved("new")
    await turns()
    peers["new"].answer("put", 8)
    assert await putting == (8, "new")


async def test_it_is_made_a_third_time_when_that_one_is_lost_too() -> None:
    storage, peers = client()
    putting = asyncio.ensure_future(storage.put(BATCH))
    await turns()
    await storage.moved("new")
    await storage.moved("newest")
    await turns()
    peers["newest"].answer("put", 8)
    assert await putting == (8, "newest")


async def test_a_put_names_the_unit_that_answered_also_when_there_is_another_by_then() -> None:
    storage, peers = client()
    putting = asyncio.ensure_future(storage.put(BATCH))
    await turns()
    peers["old"].answer("put", 8)
    await storage.moved("new")
    assert await putting == (8, "old")


async def test_being_told_twice_of_the_same_unit_interrupts_nothing() -> None:
    storage, peers = client()
    asking = asyncio.ensure_future(storage.stats())
    await turns()
    await storage.moved("old")
    peers["old"].answer("stats", StorageStats(rows=0, nbytes=0))
    assert (await asking).rows == 0


async def test_an_error_of_a_unit_that_is_not_lost_is_the_caller_s() -> None:
    storage, peers = client()
    getting = asyncio.ensure_future(storage.get([1], ["reward"]))
    await turns()
    peers["old"].answer("get", WireError("refused"))
    with pytest.raises(WireError, match="refused"):
        await getting
