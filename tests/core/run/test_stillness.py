"""What is said of a run in which nothing happens."""

from __future__ import annotations

import asyncio
from contextlib import suppress

import pytest

from headrace.run import stillness
from headrace.run.stillness import STILL, watch_stillness


@pytest.mark.parametrize(
    ("counts", "said"),
    [
        ([7] * (STILL + 1), 1),
        ([7] * (3 * STILL), 1),
        ([7] * STILL, 0),
        (list(range(3 * STILL)), 0),
        ([7] * (STILL + 1) + [8] * (STILL + 1), 2),
    ],
    ids=["just now", "for long", "not yet", "it goes on", "once more"],
)
async def test_a_run_that_stands_still_says_what_it_waits_for_once_each_time(
    monkeypatch: pytest.MonkeyPatch, counts: list[int], said: int
) -> None:
    monkeypatch.setattr(stillness, "LOOK_SECONDS", 0)
    seen = iter(counts)
    last = counts[0]

    def events() -> int:
        nonlocal last
        return last

    async def looked(seconds: float) -> None:
        nonlocal last
        try:
            last = next(seen)
        except StopIteration:
            raise asyncio.CancelledError from None

    next(seen)
    monkeypatch.setattr(asyncio, "sleep", looked)
    notices: list[str] = []
    with suppress(asyncio.CancelledError):
        await watch_stillness(events, lambda: "whole groups for this batch", notices.append)
    assert notices == ["nothing has happened for 0 s: the run waits for whole groups for this batch"] * said
