"""Requests that are decoded together, in lockstep policies.

Invariant: cohorts take turns, and each is submitted at once, in trajectory order: what is decoded together depends on
ids alone, never on arrival times. A trajectory that is withdrawn, or whose caller goes away, is not waited for; one
that comes after its cohort has begun (a second try) is not part of it.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from headrace.contract import GenerationRequest
from headrace.errors import EngineError

COHORT_DEADLINE = 60.0
REMEMBERED = 256
"""Cohorts that have begun and may still get a second try."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    """A request that waits for the others, and the call that brought it."""

    request: GenerationRequest
    call: asyncio.Task[Any] | None


class Cohort:
    """One of them. ``size``: how many trajectories belong to it."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.begun = False
        self.complete = asyncio.Event()
        self.over = asyncio.Event()
        """Set when every request that was submitted has its answer, or was given up."""
        self._entries: dict[int, _Entry] = {}
        """By trajectory, until the cohort begins."""
        self._withdrawn: set[int] = set()
        self._unanswered: set[str] = set()
        """Ids of the requests that were submitted."""

    @contextmanager
    def entered(self, trajectory: int, request: GenerationRequest) -> Iterator[bool]:
        """Be part of the cohort until the answer is there; whether it is too late. The call of an earlier try, whose
        worker was lost, is cancelled: it would never be answered."""
        if self.begun:
            yield True
            return
        earlier = self._entries.get(trajectory)
        entry = self._entries[trajectory] = _Entry(request, asyncio.current_task())
        if earlier is not None and earlier.call is not None:
            earlier.call.cancel()
        self._withdrawn.discard(trajectory)
        self._judge()
        try:
            yield False
        finally:
            if self._entries.get(trajectory) is entry:  # taken back before the cohort began
                del self._entries[trajectory]
                self.withdraw(trajectory)
            self._unanswered.discard(request.request_id)
            if self.begun and not self._unanswered:
                self.over.set()

    def withdraw(self, trajectory: int) -> None:
        """Do not wait for a trajectory."""
        if not self.begun and trajectory not in self._entries:
            self._withdrawn.add(trajectory)
            self._judge()

    def begin(self) -> list[GenerationRequest]:
        """What to submit, in trajectory order."""
        self.begun = True
        requests = [self._entries[trajectory].request for trajectory in sorted(self._entries)]
        self._entries.clear()
        self._unanswered = {request.request_id for request in requests}
        if not requests:
            self.over.set()
        return requests

    def missing(self) -> str:
        """In words, for an error."""
        return f"{len(self._entries)} of {self.size - len(self._withdrawn)} requests"

    def _judge(self) -> None:
        if len(self._entries) + len(self._withdrawn) >= self.size:
            self.complete.set()


class Cohorts:
    """All cohorts of an instance, by name."""

    def __init__(
        self,
        *,
        submit: Callable[[Sequence[GenerationRequest]], Awaitable[None]],
        supervise: Callable[[Coroutine[Any, Any, None], str], Any],
        name: str,
    ) -> None:
        self._submit = submit
        self._supervise = supervise
        self._name = name
        self._turn = asyncio.Lock()
        self._cohorts: OrderedDict[str, Cohort] = OrderedDict()

    def get(self, name: str, size: int) -> Cohort:
        """The cohort of this name; the first to ask for it opens it."""
        if name not in self._cohorts:
            cohort = self._cohorts[name] = Cohort(size)
            self._supervise(self._run(name, cohort), f"cohort {name}")
        return self._cohorts[name]

    async def _run(self, name: str, cohort: Cohort) -> None:
        try:
            await asyncio.wait_for(cohort.complete.wait(), COHORT_DEADLINE)
        except TimeoutError:
            raise EngineError(
                f"{cohort.missing()} of cohort {name} arrived in {COHORT_DEADLINE:.0f} s",
                origin=f"node {self._name}",
                fix="look for the environment worker that stopped in the run's logs",
            ) from None
        async with self._turn:
            if requests := cohort.begin():
                await self._submit(requests)
            await cohort.over.wait()
        begun = [name for name, other in self._cohorts.items() if other.begun]
        for name in begun[:-REMEMBERED]:
            del self._cohorts[name]
