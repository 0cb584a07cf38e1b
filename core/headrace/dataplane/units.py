"""The storage units as the ledger knows them: where they are, whether they live, and what they are to delete.

One rule says when a unit that is silent is lost. In a run that is for its supervisor to say, which watches the unit's
process, ends it, and has it lost for everybody at once (:meth:`Units.lose`); until then a unit is only slow, and keeps
its rows. Where nobody watches units, the ledger gives one up after ``SILENT_SECONDS``. If both counted, each by its own
measure, a unit that was slow for a while would have lost its rows here, and still be in service there.

Silence is counted in the looks of :meth:`Units.lose_silent`, not by a clock: while the ledger's process itself was
stopped it could hear nobody.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np

from headrace.contract import Array
from headrace.dataplane.gathering import sole_unit
from headrace.dataplane.links import RemoteUnit, UnitLink, settled
from headrace.dataplane.messages import Join, UnitFigures
from headrace.errors import DeadlineError, RunError

log = logging.getLogger(__name__)

SILENT_SECONDS = 5.0
"""A storage unit that nobody watches and that was not heard of for this long is gone."""
_GONE = inf
"""Silence of one that was given up."""


class Units:
    """Numbered from 1 on. ``connect``: a link to the unit at an address; ``watched``: whether somebody says when one is
    lost."""

    def __init__(self, connect: Callable[[str], RemoteUnit], *, watched: bool = False) -> None:
        self._connect = connect
        self._watched = watched
        self._addresses: list[str] = []
        self._processes: list[str] = []
        self._links: list[UnitLink] = []
        self._silence: list[float] = []
        """Seconds of looks since each was heard of, or ``_GONE``."""
        self._freed: dict[int, list[Array]] = defaultdict(list)
        """Rows to delete, by unit."""
        self._holds: dict[int, asyncio.TimerHandle] = {}
        """Of those that read what is here now, and when each must be done."""
        self._held = 0
        self._awaited: asyncio.Future[list[str]] | None = None

    def add_own(self, address: str, unit: UnitLink) -> int:
        """A unit in this process; it lives as long. Returns its number."""
        return self._add(Join(address, ""), unit, -inf)

    def join(self, unit: Join) -> int:
        """A unit is there, or still is. Returns its number. RunError for one that was given up, or joined another
        ledger before: what it keeps is of rows that are others' here."""
        if unit.process not in self._processes:
            if unit.again:
                raise RunError(
                    f"the ledger knows nothing of the storage unit at {unit.address}: another was here when it joined",
                    fix="start another one",
                )
            return self._add(unit, self._connect(unit.address), 0.0)
        number = self._processes.index(unit.process) + 1
        if self._silence[number - 1] == _GONE:
            raise RunError(
                f"the storage unit at {unit.address} was given up: it was silent too long, or another took its place",
                fix="start another one",
            )
        self._silence[number - 1] = 0.0
        return number

    def require(self, number: int) -> None:
        """RunError for one that is gone, or never was there."""
        if not 0 < number <= len(self._silence) or self._silence[number - 1] == _GONE:
            raise RunError(f"storage unit {number} is not in service", fix="start another one, and put the rows there")

    def lose_replaced(self, unit: Join) -> list[int]:
        """Give up those that were at the address of a unit which is another process; returns their numbers."""
        others = [
            number
            for number, process in enumerate(self._processes, 1)
            if process != unit.process and self.addresses()[number - 1] == unit.address
        ]
        return self._lose(others, "is another process now")

    def _add(self, unit: Join, link: UnitLink, silence: float) -> int:
        self._addresses.append(unit.address)
        self._processes.append(unit.process)
        self._links.append(link)
        self._silence.append(silence)
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(self.addresses())
        return len(self._addresses)

    def some(self, wait: float | None) -> list[str] | asyncio.Future[list[str]]:
        """:meth:`addresses`; when no unit lives, as soon as one does, or DeadlineError after ``wait`` seconds. None: as
        long as somebody waits."""
        addresses = self.addresses()
        if any(addresses):
            return addresses
        if self._awaited is None or self._awaited.done():
            self._awaited = asyncio.get_running_loop().create_future()
        return asyncio.ensure_future(_first(self._awaited, wait))

    def addresses(self) -> list[str]:
        """Of all that there ever were, by number; "" of those that are gone."""
        return ["" if silence == _GONE else unit for unit, silence in zip(self._addresses, self._silence, strict=True)]

    def lose_silent(self, seconds: float) -> list[int]:
        """A look, ``seconds`` after the one before: give up those that were silent for too long, unless somebody
        watches them; returns their numbers."""
        if self._watched:
            return []
        self._silence = [silence + seconds for silence in self._silence]
        silent = [number for number, silence in enumerate(self._silence, 1) if SILENT_SECONDS < silence < _GONE]
        return self._lose(silent, "is silent")

    def _lose(self, numbers: list[int], why: str) -> list[int]:
        """``why``: "" when whoever gives them up says it."""
        for number in numbers:
            if why:
                log.error("the storage unit at %s %s: its rows are lost", self._addresses[number - 1], why)
            self._silence[number - 1] = _GONE
            self._freed.pop(number, None)
        return numbers

    def lose(self, address: str) -> list[int]:
        """Give up the unit at ``address``; returns its number, or nothing when that was known."""
        there = [number for number, known in enumerate(self.addresses(), 1) if known == address]
        return self._lose(there, "")

    def free(self, rows: Array, units: Array) -> None:
        """Have rows deleted, once for everything that leaves in one turn of the loop. ``units``: int16 [rows, columns],
        which unit has each column, 0 for none."""
        if not self._freed:
            asyncio.get_running_loop().call_soon(self._delete)
        sole = sole_unit(units)
        if sole:
            self._freed[sole].append(rows)
            return
        for unit in np.unique(units[units > 0]).tolist():
            self._freed[unit].append(rows[(units == unit).any(axis=1)])

    def hold(self, seconds: float) -> int:
        """Nothing is deleted until :meth:`let_go` of the number that is returned, for at most ``seconds``."""
        self._held += 1
        self._holds[self._held] = asyncio.get_running_loop().call_later(seconds, self.let_go, self._held)
        return self._held

    def let_go(self, hold: int) -> bool:
        """Whether it had held until now."""
        timer = self._holds.pop(hold, None)
        if timer is not None:
            timer.cancel()
            self._delete()
        return timer is not None

    def _delete(self) -> None:
        if self._holds:
            return
        for unit, rows in self._freed.items():
            if self._silence[unit - 1] != _GONE:
                answer = self._links[unit - 1].delete(np.concatenate(rows))
                if answer is not None:
                    answer.add_done_callback(partial(self._told, unit))
        self._freed.clear()

    def _told(self, unit: int, call: asyncio.Future[None]) -> None:
        """What a unit that is gone was to delete went with it."""
        error = None if call.cancelled() else call.exception()
        if error is not None and self._silence[unit - 1] != _GONE:
            log.warning("rows stay in a storage unit until it ends: %s", error)

    async def figures(self) -> dict[str, UnitFigures | None]:
        """Of those that live, by address; None for one that does not answer."""
        there = {address: link for address, link in zip(self.addresses(), self._links, strict=True) if address}
        asked = [settled(link.figures(None)) for link in there.values()]
        told = await asyncio.gather(*asked, return_exceptions=True)
        return {
            address: None if isinstance(answer, BaseException) else answer
            for address, answer in zip(there, told, strict=True)
        }

    async def close(self) -> None:
        """Give up every unit, and what they were still asked."""
        self._silence = [_GONE] * len(self._silence)
        for timer in self._holds.values():
            timer.cancel()
        for link in self._links:
            if isinstance(link, RemoteUnit):
                await link.close()


async def _first(awaited: asyncio.Future[list[str]], wait: float | None) -> list[str]:
    """What others await too. DeadlineError after ``wait`` seconds."""
    try:
        async with asyncio.timeout(wait):
            return await asyncio.shield(awaited)
    except TimeoutError:
        raise DeadlineError(
            f"no storage unit is in service, and none came within {wait:.3g} s", fix="start one: serve_unit"
        ) from None
