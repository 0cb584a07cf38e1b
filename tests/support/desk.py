"""The controller's desk without processes: nodes are peers that answer when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine
from typing import Any

import numpy as np

from headrace.contract import StalenessPolicy, WeightManifest
from headrace.errors import WireError
from headrace.flow import Flow
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.groups import GroupPlan
from headrace.services.messages import (
    GroupFailed,
    GroupStored,
    Published,
    Report,
    TrajectoryFinished,
    VersionLoaded,
    WorkItem,
    WorkRequest,
)
from headrace_staleness.multi_version import MultiVersion

STORAGE = "storage-0.0"
TURNS = 20
"""Of the event loop, after which nothing is left to do but what waits for a peer."""


class Peer:
    """A client of a node: what is asked waits for :meth:`answer`, or for :meth:`close`; but methods that are answered
    ``at_once``, with nothing."""

    def __init__(self, address: str, at_once: Collection[str] = ()) -> None:
        self.address = address
        self._at_once = at_once
        self.closed = False
        self.asked: list[tuple[str, Any]] = []
        self._waiting: list[tuple[str, asyncio.Future[Any]]] = []

    async def call(self, method: str, request: Any = None, **_: Any) -> Any:
        if self.closed:
            raise WireError(f"the client of {self.address} is closed")
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self.asked.append((method, request))
        if method in self._at_once:
            return None
        self._waiting.append((method, future))
        return await future

    def waits(self, method: str) -> bool:
        """Whether a call waits for its answer."""
        return any(name == method and not future.done() for name, future in self._waiting)

    def answer(self, method: str, value: Any = None) -> None:
        """Answer the oldest waiting call; an exception is raised at the caller."""
        future = next(f for name, f in self._waiting if name == method and not f.done())
        if isinstance(value, Exception):
            future.set_exception(value)
        else:
            future.set_result(value)

    async def close(self) -> None:
        self.closed = True
        for _, future in self._waiting:
            if not future.done():
                future.set_exception(WireError(f"the client of {self.address} was closed during the call"))


def published(version: int) -> Published:
    """As a trainer says it."""
    manifest = WeightManifest(version=version, tensors=(), nbytes=1, digest=f"d{version}")
    return Published(manifest=manifest, logprobs=np.zeros(1, dtype=np.float32))


def loaded(version: int) -> VersionLoaded:
    """As an instance says it that has the right weights."""
    return VersionLoaded(version=version, digest=f"d{version}", seconds=0.0, logprobs=None)


def plan(**changed: Any) -> GroupPlan:
    """A group's task is its id."""
    told: dict[str, Any] = {
        "rollout": True,
        "max_new_tokens": 4,
        "temperature": 1.0,
        "task_index": lambda group: group,
        "next_task": lambda task: task + 1,
        "seed": lambda trajectory: trajectory,
        "max_failed_share": 1.0,
    }
    return GroupPlan(**(told | changed))


class Desk:
    """Two instances serve version 0 of a phase; groups of two, batches of one, unless said otherwise."""

    def __init__(
        self,
        *,
        instances: int = 2,
        group_size: int = 2,
        batch_groups: int = 1,
        max_attempts: int = 3,
        policy: StalenessPolicy | None = None,
        **planned: Any,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.peers: dict[str, Peer] = {}
        self.at_once = {"retire_version"}
        self.failures: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.fleet = Fleet(emit=self.emit, spawn=self.spawn, connect=self.connect, temperature=1.0, tolerance=1.0)  # type: ignore[arg-type]  # calls only
        self.controller = Controller(emit=self.emit, fleet=self.fleet, max_attempts=max_attempts)
        self.controller.storage = STORAGE
        self.flow = Flow(
            policy=policy or MultiVersion(MultiVersion.Settings(max_staleness=2)),
            batch_groups=batch_groups,
            group_size=group_size,
        )
        self._instances, self._plan = instances, plan(**planned)

    async def begin(self) -> Desk:
        """Instances join, load version 0, and the phase begins."""
        self.fleet.published(published(0))
        for number in range(self._instances):
            self.join(f"rollout-{number}")
        loading = asyncio.ensure_future(self.fleet.load_everywhere(0))
        await turns()
        for peer in self.peers.values():
            peer.answer("load_version", loaded(0))
        await loading
        self.fleet.follow(self.flow)
        self.controller.begin_phase(self.flow, self._plan)
        return self

    def join(self, name: str, *, start: int = 0, live_versions: int = 2) -> Peer:
        """An instance serves."""
        address = f"{name}.{start}"
        self.fleet.join(name, address, slots=8, live_versions=live_versions)
        return self.peers[address]

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [fields for name, fields in self.events if name == kind]

    def connect(self, address: str) -> Peer:
        return self.peers.setdefault(address, Peer(address, self.at_once))

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            self.failures.append(error)

    # ------------------------------------------------------------ workers

    async def work(self, worker: str) -> WorkItem | None:
        """What a worker that asks is given at once; None when it has to wait, and gives its place up."""
        asking = asyncio.ensure_future(self.controller.next_work(WorkRequest(worker=worker)))
        await turns()
        if not asking.done():
            asking.cancel()
            await asyncio.wait({asking})
        return None if asking.cancelled() else asking.result()

    async def say(self, worker: str, *entries: Any) -> None:
        """A report arrives."""
        await self.controller.report(Report(worker=worker, entries=list(entries)))


def finished(item: WorkItem, trajectory: int) -> TrajectoryFinished:
    return TrajectoryFinished(
        group=item.group,
        trajectory=trajectory,
        spans=[(item.version, 0, 3)],
        prompt_tokens=2,
        response_tokens=3,
        finish_reason="stop",
        started=0.0,
        finished=1.0,
    )


def stored(item: WorkItem, storage: str = STORAGE) -> GroupStored:
    size = len(item.members)
    return GroupStored(
        group=item.group,
        trajectories=[member.trajectory for member in item.members],
        versions=[item.version] * size,
        tokens=[5] * size,
        nbytes=[10] * size,
        rewards=[1.0] * size,
        storage=storage,
    )


def failed(item: WorkItem, reason: str = "ValueError") -> GroupFailed:
    return GroupFailed(group=item.group, trajectory=item.members[0].trajectory, reason=reason, detail="Traceback")


def played(item: WorkItem, storage: str = STORAGE) -> list[TrajectoryFinished | GroupStored]:
    """Everything a worker says of a group that goes well."""
    return [*(finished(item, member.trajectory) for member in item.members), stored(item, storage)]


async def turns() -> None:
    """Let everything happen that can."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
