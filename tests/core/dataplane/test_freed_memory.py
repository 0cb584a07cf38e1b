"""A storage unit's process is as large as what it keeps, and what it may have kept of freed memory."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Column, Ragged
from headrace.dataplane import ColumnSchema, DataPlane, PartitionSpec
from headrace.dataplane.serve import serve_ledger, serve_unit
from headrace.dataplane.unit import KEPT_FREE_BYTES
from headrace.wire import ipc_address
from headrace_storage.memory import MemoryStorage
from support.data_plane import soon

SPEC = PartitionSpec("phase", {"values": ColumnSchema("uint8", ragged=True)}, {"train": ("values",)})
LENGTHS = (100_000, 1 << 20, 8 << 20, 300_000, 3 << 20)
"""Bytes of rows that are put one by one: from such as share pages with others to such as are many megabytes."""


def ledger(address: str) -> None:
    asyncio.run(serve_ledger(address))


def unit(address: str, to: str) -> None:
    asyncio.run(serve_unit(address, MemoryStorage(None), ledger=to))


@contextmanager
def a_ledger_and_a_unit(directory: Path) -> Iterator[tuple[str, int]]:
    """Address of the one, and pid of the other."""
    context = multiprocessing.get_context("forkserver")
    address = ipc_address(str(directory), "ledger")
    roles = [
        context.Process(target=ledger, args=(address,), daemon=True),
        context.Process(target=unit, args=(ipc_address(str(directory), "unit"), address), daemon=True),
    ]
    for role in roles:
        role.start()
    try:
        yield address, roles[1].pid or 0
    finally:
        for role in roles:
            role.kill()
            role.join()


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ones(lengths: list[int]) -> dict[str, Column]:
    return {"values": Ragged(np.ones(sum(lengths), np.uint8), np.cumsum([0, *lengths]))}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_a_unit_gives_back_what_was_dropped_although_its_newest_row_stays(tmp_path: Path) -> None:
    with a_ledger_and_a_unit(tmp_path) as (address, pid):
        plane = DataPlane(address)
        partition = plane.create(SPEC)
        partition.put(ones([10]))
        before = resident(pid)
        dropped = [int(row) for length in LENGTHS * 30 for row in partition.put(ones([length]))]
        dropped += partition.put(ones([4_000] * 10_000)).tolist()
        assert resident(pid) > before + 3 * KEPT_FREE_BYTES // 2, "or nothing is shown"
        partition.put(ones([10]))
        partition.drop(dropped)
        soon(lambda: resident(pid) < before + KEPT_FREE_BYTES)
        _, batch = partition.take("train", 2)
        assert [values.tolist() for values in batch.ragged("values")] == [[1] * 10] * 2
        plane.close()
