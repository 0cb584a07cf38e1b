"""Tells when nothing happens in a run any more: what it waits for may never come, such as the leave of a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_SECONDS = 5.0
STILL = 24
"""Looks in a row that find nothing new."""


async def watch_stillness(events: Callable[[], int], awaits: Callable[[], str], notice: Callable[[str], None]) -> None:
    """``events``: how many there were so far; ``awaits``: what the run waits for, in words. Says so once, for each time
    that it stands still; never returns."""
    before, still = events(), 0
    while True:
        await asyncio.sleep(LOOK_SECONDS)
        still = still + 1 if events() == before else 0
        before = events()
        if still == STILL:
            notice(f"nothing has happened for {STILL * LOOK_SECONDS:.0f} s: the run waits for {awaits()}")
