"""How long an episode may go on without anybody hearing of it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from headrace.errors import DeadlineError


class OwnTime:
    """Of an episode: what it spends waiting for tokens is not its own. ``seconds``: how long it may take each time
    until it waits for tokens again, or ends."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._waiting = 0
        """Calls that wait for tokens."""
        self._limit: asyncio.Timeout | None = None

    @property
    def runs(self) -> bool:
        """Whether it is running out now."""
        return self._limit is not None and self._limit.when() is not None

    @asynccontextmanager
    async def bounded(self, episode: str) -> AsyncIterator[None]:
        """DeadlineError, which names the ``episode``, when the block takes longer: nobody else would notice, since
        other episodes go on."""
        limit = self._limit = asyncio.timeout(self._seconds)
        try:
            async with limit:
                yield
        except TimeoutError as error:
            if not limit.expired():  # it is the environment's own
                raise
            raise DeadlineError(
                f"{episode} did nothing for {self._seconds:g} s: its environment neither asked for tokens nor returned",
                fix="give what the environment waits for a deadline, or raise [environment] episode_deadline",
            ) from error
        finally:
            self._limit = None

    @contextmanager
    def waits_for_tokens(self) -> Iterator[None]:
        """The block is not the episode's own time."""
        self._waiting += 1
        self._move(None)
        try:
            yield
        finally:
            self._waiting -= 1
            if not self._waiting:
                self._move(asyncio.get_running_loop().time() + self._seconds)

    def _move(self, when: float | None) -> None:
        if self._limit is not None and not self._limit.expired():
            self._limit.reschedule(when)
