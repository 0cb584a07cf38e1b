"""The storage units as the ledger knows them: where they are, whether they live, and what they are to delete."""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from math import inf
from time import monotonic

import numpy as np

from headrace.contract import Array
from headrace.dataplane.links import RemoteUnit, UnitLink
from headrace.errors import RunError

log = logging.getLogger(__name__)

SILENT_SECONDS = 5.0
"""A storage unit that was not heard of for this long is gone."""
GONE = -1.0


class Units:
    """Numbered from 1 on. ``connect``: a link to the unit at an address."""

    def __init__(self, connect: Callable[[str], RemoteUnit]) -> None:
        self._connect = connect
        self._addresses: list[str] = []
        self._links: list[UnitLink] = []
        self._seen: list[float] = []
        """When each was last heard of, or ``GONE``."""
        self._freed: dict[int, list[Array]] = defaultdict(list)
        """Rows to delete, by unit."""

    def add_own(self, address: str, unit: UnitLink) -> int:
        """A unit in this process; it lives as long. Returns its number."""
        return self._add(address, unit, inf)

    def join(self, address: str) -> int:
        """A unit is there, or still is. Returns its number. RunError for one that was given up."""
        if address not in self._addresses:
            return self._add(address, self._connect(address), monotonic())
        number = self._addresses.index(address) + 1
        if self._seen[number - 1] == GONE:
            raise RunError(
                f"the storage unit at {address} was silent for too long and was given up", fix="start another one"
            )
        self._seen[number - 1] = max(self._seen[number - 1], monotonic())
        return number

    def _add(self, address: str, link: UnitLink, seen: float) -> int:
        self._addresses.append(address)
        self._links.append(link)
        self._seen.append(seen)
        return len(self._addresses)

    def addresses(self) -> list[str]:
        """Of all that there ever were, by number; "" of those that are gone."""
        return ["" if seen == GONE else unit for unit, seen in zip(self._addresses, self._seen, strict=True)]

    def lose_silent(self, now: float) -> list[int]:
        """Give up those that were silent for too long; returns their numbers."""
        silent = [number for number, seen in enumerate(self._seen, 1) if GONE < seen < now - SILENT_SECONDS]
        for number in silent:
            log.error("the storage unit at %s is silent: its rows are lost", self._addresses[number - 1])
            self._seen[number - 1] = GONE
            self._freed.pop(number, None)
        return silent

    def free(self, rows: Array, units: Array) -> None:
        """Have rows deleted, once for everything that leaves in one turn of the loop. ``units``: int16 [rows, columns],
        which unit has each column, 0 for none."""
        if not self._freed:
            asyncio.get_running_loop().call_soon(self._delete)
        for unit in np.unique(units[units > 0]).tolist():
            self._freed[unit].append(rows[(units == unit).any(axis=1)])

    def _delete(self) -> None:
        for unit, rows in self._freed.items():
            if self._seen[unit - 1] != GONE:
                answer = self._links[unit - 1].delete(np.concatenate(rows))
                if answer is not None:
                    answer.add_done_callback(_told)
        self._freed.clear()

    async def close(self) -> None:
        for link in self._links:
            if isinstance(link, RemoteUnit):
                await link.close()


def _told(call: asyncio.Future[None]) -> None:
    if not call.cancelled() and (error := call.exception()):
        log.warning("rows stay in a storage unit until it ends: %s", error)
