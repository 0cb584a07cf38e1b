"""What is said of a storage that is too small for a batch."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from math import prod

import numpy as np
import pytest

from headrace.config.room import SMALLEST_ROW
from headrace.contract import AlgorithmNeeds
from headrace.dataplane.messages import UnitFigures
from headrace.flow.stages import stages_of
from headrace.run.columns import flow_columns, phase_partition
from headrace.run.room import STILL, watch_room

FULL = UnitFigures(rows=30, nbytes=1300, capacity=1400, waiting=2, waiting_bytes=600, refused={})
ROOMY = UnitFigures(rows=3, nbytes=130, capacity=1400, waiting=0, waiting_bytes=0, refused={})
MOVING = [UnitFigures(30 + turn, 1300, 1400, 2, 600, {}) for turn in range(3 * STILL)]


class Ledger:
    """Whose unit is each of these in turn, then is not asked any more."""

    def __init__(self, figures: list[UnitFigures]) -> None:
        self._left = list(figures)

    async def unit_figures(self) -> dict[str, UnitFigures | None]:
        if not self._left:
            raise asyncio.CancelledError
        return {"a": self._left.pop(0), "b": None}


@pytest.mark.parametrize(
    ("figures", "waits", "said"),
    [
        ([FULL] * (3 * STILL), lambda: True, 1),
        ([FULL] * STILL, lambda: True, 0),
        ([FULL] * (3 * STILL), lambda: False, 0),
        ([ROOMY] * (3 * STILL), lambda: True, 0),
        (MOVING, lambda: True, 0),
        ([*[FULL] * (STILL + 1), ROOMY] * 2, lambda: True, 2),
    ],
)
async def test_a_run_that_stands_still_for_want_of_room_says_so_once_each_time(
    monkeypatch: pytest.MonkeyPatch, figures: list[UnitFigures], waits: Callable[[], bool], said: int
) -> None:
    monkeypatch.setattr("headrace.run.room.LOOK_SECONDS", 0)
    notices: list[str] = []
    with suppress(asyncio.CancelledError):
        await watch_room(Ledger(figures), waits, notices.append)  # type: ignore[arg-type]
    assert len(notices) == said
    for notice in notices:
        assert "2 puts of 600 bytes wait for room, beside 30 rows of 1300 bytes" in notice
        assert "storage.capacity = 1400 is too little for a batch: stop, raise it, and resume" in notice


def test_the_smallest_row_is_one_of_two_tokens_in_the_columns_of_a_run() -> None:
    least = flow_columns(
        stages_of(AlgorithmNeeds(rollout=False, behaviour_logprobs=False)), apart=False, lockstep=False
    )
    columns = phase_partition("any", least, group_size=1).columns.values()
    sizes = [np.dtype(column.dtype).itemsize * prod(column.shape) * (2 if column.ragged else 1) for column in columns]
    assert sum(sizes) == SMALLEST_ROW
