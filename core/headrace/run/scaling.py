"""Rollout instances join and leave while the run is running.

What is asked for is an absolute number, so that asking twice is asking once. One operation at a time. Who joins serves
nothing before it has proved to have a version (:mod:`headrace.services.fleet`). The youngest leave first, drained and
never cut: they get nothing new, what they have finishes, and then their process ends. A name is never used again.

An instance that cannot be started is given up, with the reason to who asked; those that could be stay.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, Protocol

from headrace.errors import HeadraceError, RunError
from headrace.services.fleet import Fleet
from headrace.services.messages import Message, PeerCall
from headrace.services.supervisor import Supervisor
from headrace.services.workers import Workers
from headrace.wire import rpc

ANSWER_SECONDS = 5.0
"""After which who asks is told what is under way, and may ask again."""


class ScaleCall(Message, frozen=True):
    """So many rollout instances are to be there."""

    instances: int


class Scale(Message, frozen=True):
    """Where that stands."""

    instances: list[str]
    """Those that are to stay, oldest first."""
    joining: list[str]
    leaving: list[str]
    given_up: list[str]
    """Why instances that were to join did not."""


class Nodes(Protocol):
    """What scaling works on."""

    fleet: Fleet
    workers: Workers
    supervisor: Supervisor

    def join(self, name: str, address: str) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]: ...


class Scaling:
    """One per run. ``names``: the instances at the start; ``launch`` starts the node of another one."""

    def __init__(
        self,
        nodes: Nodes,
        names: Sequence[str],
        *,
        launch: Callable[[str], Awaitable[None]],
    ) -> None:
        self._nodes = nodes
        self._launch = launch
        self._names = list(names)
        self._numbered = len(names)
        """How many names were given out."""
        self._target = len(names)
        self._operation: asyncio.Task[None] | None = None
        self._joining: list[str] = []
        self._leaving: dict[str, asyncio.Event] = {}
        """Instance → set when its process has ended."""
        self._given_up: list[str] = []

    @rpc
    async def scale(self, call: ScaleCall) -> Scale:
        """Answered when as many are there, or after a while with what is under way."""
        self.reach(call.instances)
        if self._operation is not None:
            await asyncio.wait({self._operation}, timeout=ANSWER_SECONDS)
        return Scale(
            instances=list(self._names),
            joining=list(self._joining),
            leaving=list(self._leaving),
            given_up=list(self._given_up),
        )

    def wants(self, name: str) -> bool:
        """Whether an instance is to stay."""
        return name not in self._leaving

    async def dismiss(self, name: str) -> None:
        """An instance that is to leave has nothing left: its process ends, if it has not."""
        await self._nodes.supervisor.stop(name)
        self._leaving[name].set()

    # ------------------------------------------------------------ one operation

    @property
    def size(self) -> int:
        """Instances that are to be there when nothing is under way."""
        return len(self._names) + len(self._joining)

    @property
    def under_way(self) -> bool:
        """Whether instances join or leave."""
        return self._operation is not None and not self._operation.done()

    def reach(self, target: int) -> None:
        """Begin to, unless that is under way or so many are there. RunError when another change is under way."""
        if target < 1:
            raise RunError(
                f"{target} rollout instances were asked for; a run cannot go on without any",
                fix="ask for 1 at least; Ctrl-C ends a run, and `headrace run --resume` continues it",
            )
        if self.under_way:
            if target != self._target:
                raise RunError(
                    f"the run is being scaled to {self._target} rollout instances; one change is made at a time",
                    origin=", ".join([*(f"{n} joins" for n in self._joining), *(f"{n} leaves" for n in self._leaving)]),
                    fix="ask again when that is done",
                )
            return
        self._given_up.clear()
        if target != len(self._names):
            self._target = target
            self._operation = self._nodes.spawn(self._reach(target), f"scale to {target}")

    async def _reach(self, target: int) -> None:
        missing = target - len(self._names)
        self._joining = [f"rollout-{self._numbered + i}" for i in range(missing)]
        self._numbered += len(self._joining)
        youngest = reversed(self._names[target:])
        self._leaving = {name: asyncio.Event() for name in youngest}
        del self._names[target:]
        try:
            joined = await asyncio.gather(*map(self._join, self._joining))
            self._names += [name for name, serves in zip(self._joining, joined, strict=True) if serves]
            await asyncio.gather(*map(self._leave, self._leaving))
        finally:
            self._joining, self._leaving = [], {}

    async def _join(self, name: str) -> bool:
        """Whether it serves in the end."""
        nodes = self._nodes
        try:
            await self._launch(name)
            address = await nodes.supervisor.address(name)
        except HeadraceError as error:
            self._given_up.append(str(error))
            await nodes.supervisor.stop(name)
            return False
        nodes.join(name, address)
        await nodes.fleet.serves(name)
        return True

    async def _leave(self, name: str) -> None:
        """One that is lost at the moment is dismissed instead of joining again."""
        self._nodes.fleet.drain(name)
        await self._leaving[name].wait()

    def left(self, name: str, address: str) -> None:
        """A drained instance has nothing any more and gets nothing."""
        self._nodes.supervisor.dismiss(name)
        self._nodes.spawn(self._take_leave(name, address), f"{name} leaves")

    async def _take_leave(self, name: str, address: str) -> None:
        await self._nodes.workers.tell("instance_lost", PeerCall(address=address), awaiting=f"to forget {name}")
        await self.dismiss(name)
