"""What the ledger asks of its storage units, and what it says of those that do not answer."""

from __future__ import annotations

import asyncio
import gc
import time
from typing import Any

import numpy as np
import pytest

from headrace.dataplane import ColumnSchema, LedgerService, PartitionSpec
from headrace.dataplane.messages import Join, LeaseCall, LeaseRef
from headrace.dataplane.units import SILENT_SECONDS, Units
from support.desk import Peer, turns


class Link:
    """A unit that never answers by itself."""

    def __init__(self) -> None:
        self.call: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def delete(self, _: Any) -> asyncio.Future[None]:
        return self.call


@pytest.mark.parametrize("is_lost", [True, False])
async def test_rows_that_stay_are_told_of_only_while_their_unit_lives(
    is_lost: bool, caplog: pytest.LogCaptureFixture
) -> None:
    link = Link()
    units = Units(lambda _: link)  # type: ignore[arg-type,return-value]  # deletes only
    number = units.join(Join("unit", "process"))
    units.free(np.arange(3), np.full((3, 1), number, dtype=np.int16))
    await turns()
    if is_lost:
        assert units.lose("unit") == [number]
    link.call.set_exception(RuntimeError("no answer"))
    await turns()
    del link.call
    gc.collect()  # whose outcome nobody had asked for would be told now
    assert [record.getMessage() for record in caplog.records] == (
        [] if is_lost else ["rows stay in a storage unit until it ends: no answer"]
    )


def test_a_unit_is_given_up_after_too_many_looks_in_a_row_without_a_word_of_it() -> None:
    units = Units(lambda _: None)  # type: ignore[arg-type,return-value]  # nothing is asked of it
    for _ in range(3):
        number = units.join(Join("unit", "process"))
        assert units.lose_silent(SILENT_SECONDS) == []
    assert units.lose_silent(0.1) == [number]
    assert units.lose_silent(0.1) == []
    assert units.addresses() == [""]


async def test_rows_that_whoever_counts_them_gives_up_stay_until_the_lease_on_them_ends() -> None:
    """Their holder may be reading them where they lie."""
    peer = Peer("unit")
    ledger = LedgerService(connect=lambda _: peer)  # type: ignore[arg-type,return-value]  # calls only
    unit = ledger.join(Join("unit", "process"))
    ledger.create(PartitionSpec("phase", {"x": ColumnSchema("int8")}, {"train": ("x",)}))
    (partition,) = ledger.partitions
    first = partition.ledger.insert(2, 0, ("x",), nbytes=1, unit=unit)
    granted = ledger.lease(LeaseCall("phase", "train", 1, 1, 1.0, 60.0))
    groups = np.arange(first, first + 2)
    for group in groups.tolist():
        partition.ledger.drop(group)
    ledger.free(partition, groups)
    await turns()
    assert [(method, rows.tolist()) for method, rows in peer.asked] == [("delete", [first + 1])]
    ledger.release(LeaseRef("phase", granted.lease))
    await turns()
    assert peer.asked[1][1].tolist() == [first]
    await ledger.close()


async def test_a_ledger_whose_process_was_stopped_gives_up_no_unit(monkeypatch: pytest.MonkeyPatch) -> None:
    """It could hear nobody; what they said meanwhile is still on its way."""
    monkeypatch.setattr("headrace.dataplane.units.SILENT_SECONDS", 0.1)
    monkeypatch.setattr("headrace.dataplane.ledger.WATCH_SECONDS", 0.05)
    ledger = LedgerService(connect=Peer)  # type: ignore[arg-type]  # calls only
    ledger.join(Join("unit", "process"))
    time.sleep(0.2)  # noqa: ASYNC251  # the process is stopped
    ledger._look()
    assert ledger.units(None) == ["unit"]
    await ledger.close()
