"""Latency and failures that a person sets: every fake takes the same two, and both are deterministic."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass

from headrace.errors import HeadraceError


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeSettings:
    """What goes wrong, and how slowly."""

    latency: float = 0.0
    """Seconds that every piece of work takes."""
    fail_after: int | None = None
    """Pieces of work that succeed; every later one fails. None: nothing fails."""

    def __post_init__(self) -> None:
        if self.latency < 0 or (self.fail_after is not None and self.fail_after < 0):
            raise ValueError(f"latency and fail_after must be at least 0, got {self.latency} and {self.fail_after}")


class Trouble:
    """Counts pieces of work; ``error`` is raised, in words that name the setting, once they are used up."""

    def __init__(self, settings: FakeSettings, *, error: type[HeadraceError]) -> None:
        self._settings = settings
        self._error = error
        self._done = 0

    def work(self, what: str) -> None:
        """One piece of work, which takes its time and may fail."""
        time.sleep(self._settings.latency)
        self._count(what)

    async def work_async(self, what: str) -> None:
        """As :meth:`work`; others run meanwhile, also without latency."""
        await asyncio.sleep(self._settings.latency)
        self._count(what)

    def _count(self, what: str) -> None:
        limit = self._settings.fail_after
        if limit is not None and self._done >= limit:
            raise self._error(
                f"{what} failed, as fail_after = {limit} says", fix="leave fail_after out to have it succeed"
            )
        self._done += 1
