"""What the ledger asks of its storage units, and what it says of those that do not answer."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.dataplane.messages import Join
from headrace.dataplane.units import Units
from support.desk import turns


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
    assert [record.getMessage() for record in caplog.records] == (
        [] if is_lost else ["rows stay in a storage unit until it ends: no answer"]
    )
