"""The ledger as a unit sees it, and a unit as the ledger does: in the same process or in another one.

What a method returns is the answer, or a promise of it from another process.
"""

from __future__ import annotations

import asyncio
import logging
from types import NoneType
from typing import Protocol, TypeVar

from headrace.contract import Array
from headrace.dataplane.messages import Described, Join, Noted, Notes, UnitFigures, Unkept
from headrace.wire import Client

T = TypeVar("T")

log = logging.getLogger(__name__)

DEADLINE = 60.0
FIGURES_DEADLINE = 2.0


class LedgerLink(Protocol):
    """What a unit needs of the ledger."""

    def join(self, unit: Join, /) -> int | asyncio.Future[int]:
        """The number of a unit."""

    def describe(self, partition: str, /) -> Described | asyncio.Future[Described]:
        """What a partition's columns are."""

    def note(self, notes: Notes, /) -> list[Noted] | asyncio.Future[list[Noted]]:
        """Tell of rows that are about to be kept."""

    def kept(self, partition: str, /) -> None:
        """They are kept."""

    def unkept(self, unkept: Unkept, /) -> None:
        """They could not be kept."""


class UnitLink(Protocol):
    """What the ledger needs of a unit."""

    def delete(self, rows: Array, /) -> asyncio.Future[None] | None:
        """Free rows."""

    def figures(self, request: None, /) -> UnitFigures | asyncio.Future[UnitFigures]:
        """How full it is."""


class RemoteLedger:
    """In another process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def join(self, unit: Join) -> asyncio.Future[int]:
        return self._client.submit(
            "join", unit, reply=int, deadline=DEADLINE, awaiting="the ledger to take a storage unit"
        )

    def describe(self, partition: str) -> asyncio.Future[Described]:
        return self._client.submit(
            "describe", partition, reply=Described, deadline=DEADLINE, awaiting="the schema of a partition"
        )

    def note(self, notes: Notes) -> asyncio.Future[list[Noted]]:
        return self._client.submit(
            "note", notes, reply=list[Noted], deadline=DEADLINE, awaiting="the ledger to take rows"
        )

    def kept(self, partition: str) -> None:
        """It has offered them when it was told: by the time a consumer asks for them, they are here."""

    def unkept(self, unkept: Unkept) -> None:
        told = self._client.submit(
            "unkept", unkept, reply=NoneType, deadline=DEADLINE, awaiting="the ledger to give up rows"
        )
        told.add_done_callback(_gave_up)


class RemoteUnit:
    """In another process."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def delete(self, rows: Array) -> asyncio.Future[None]:
        return self._client.submit("delete", rows, deadline=DEADLINE, awaiting="a storage unit to free rows")

    def figures(self, request: None) -> asyncio.Future[UnitFigures]:
        return self._client.submit(
            "figures", reply=UnitFigures, deadline=FIGURES_DEADLINE, awaiting="a storage unit's figures"
        )

    async def close(self) -> None:
        """Pending calls fail."""
        await self._client.close()


def _gave_up(call: asyncio.Future[None]) -> None:
    if not call.cancelled() and (error := call.exception()):
        log.error("the ledger still offers rows that no storage unit has: %s", error)


async def settled(answer: T | asyncio.Future[T]) -> T:
    """The answer, from wherever it comes."""
    return await answer if isinstance(answer, asyncio.Future) else answer
