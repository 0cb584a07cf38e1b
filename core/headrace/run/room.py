"""Tells when a run stands still because its storage is full of rows that make no batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from headrace.dataplane import LedgerService

LOOK_SECONDS = 5.0
STILL = 6
"""Looks in a row that find the same."""


async def watch_room(ledger: LedgerService, waits: Callable[[], bool], notice: Callable[[str], None]) -> None:
    """``waits``: whether the trainer waits for a batch. Says once, for each time that it happens, what is awaited."""
    before, still = "", 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        units = [figures for figures in (await ledger.unit_figures()).values() if figures is not None]
        puts, wanted = sum(unit.waiting for unit in units), sum(unit.waiting_bytes for unit in units)
        held, rows = sum(unit.nbytes for unit in units), sum(unit.rows for unit in units)
        found = f"{puts} puts of {wanted} bytes wait for room, beside {rows} rows of {held} bytes"
        still = still + 1 if puts and waits() and found == before else 0
        before = found
        if still == STILL:
            notice(
                f"the trainer waits for a batch, and its rows for room in storage: {found}; storage.capacity = "
                f"{max(unit.capacity for unit in units)} is too little for a batch: stop, raise it, and resume"
            )
