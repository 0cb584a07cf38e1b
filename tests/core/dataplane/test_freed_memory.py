"""A storage unit's process is as large as what it keeps, and what it may have kept of freed memory."""

from __future__ import annotations

import os
import sys
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Column, Ragged
from headrace.dataplane import ColumnSchema, DataPlane, PartitionSpec
from headrace.dataplane.unit import KEPT_FREE_BYTES
from support.data_plane import soon
from support.served import a_ledger_and_a_unit

SPEC = PartitionSpec("phase", {"values": ColumnSchema("uint8", ragged=True)}, {"train": ("values",)})
LENGTHS = (100_000, 1 << 20, 8 << 20, 300_000, 3 << 20)
"""Bytes of rows that are put one by one: from such as share pages with others to such as are many megabytes."""

OWN_BYTES = 64 << 20
"""By which the process may have grown for itself."""


def resident(pid: int) -> int:
    """Bytes."""
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def ones(lengths: list[int]) -> dict[str, Column]:
    return {"values": Ragged(np.ones(sum(lengths), np.uint8), np.cumsum([0, *lengths]))}


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_a_unit_is_no_larger_for_the_large_rows_that_came_and_went(tmp_path: Path) -> None:
    with a_ledger_and_a_unit(tmp_path) as (address, pid), closing(DataPlane(address)) as plane:
        partition = plane.create(SPEC)
        partition.put(ones([10]))
        before, row = resident(pid), 64 << 20
        for _ in range(12):
            partition.drop(partition.put(ones([row])).tolist())
            assert resident(pid) < before + KEPT_FREE_BYTES + 3 * row + OWN_BYTES


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere nothing is given back")
def test_a_unit_gives_back_what_was_dropped_although_its_newest_row_stays(tmp_path: Path) -> None:
    with a_ledger_and_a_unit(tmp_path) as (address, pid), closing(DataPlane(address)) as plane:
        partition = plane.create(SPEC)
        partition.put(ones([10]))
        before = resident(pid)
        dropped = [int(row) for length in LENGTHS * 30 for row in partition.put(ones([length]))]
        dropped += partition.put(ones([4_000] * 10_000)).tolist()
        assert resident(pid) > before + 3 * KEPT_FREE_BYTES // 2, "or nothing is shown"
        partition.put(ones([10]))
        partition.drop(dropped)
        soon(lambda: resident(pid) < before + KEPT_FREE_BYTES + OWN_BYTES)
        _, batch = partition.take("train", 2)
        assert [values.tolist() for values in batch.ragged("values")] == [[1] * 10] * 2
