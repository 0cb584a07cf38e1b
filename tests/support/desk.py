"""The controller's desk without processes: nodes are peers that answer when the test says so."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Coroutine, Sequence
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np

from headrace.contract import AlgorithmNeeds, StalenessPolicy, WeightManifest
from headrace.contract.columns import REWARD, VERSION
from headrace.dataplane import LedgerService, Note
from headrace.dataplane.messages import Join, Notes
from headrace.errors import WireError
from headrace.flow import Flow
from headrace.flow.stages import stages_of
from headrace.run.columns import flow_columns, phase_partition
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.groups import GroupPlan
from headrace.services.messages import (
    GroupFailed,
    Published,
    Report,
    TrajectoryFinished,
    VersionLoaded,
    WorkItem,
    WorkRequest,
)
from headrace.services.request_messages import Switched
from headrace.wire.failures import from_failure
from headrace_staleness.multi_version import MultiVersion

PARTITION = "rl"
COLUMNS = flow_columns(stages_of(AlgorithmNeeds()), apart=False, lockstep=False)
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

    def submit(self, method: str, request: Any = None, **_: Any) -> asyncio.Future[Any]:
        """Answered at once, with nothing."""
        self.asked.append((method, request))
        done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

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
    return VersionLoaded(version=version, digest=f"d{version}", transfer_seconds=0.0, logprobs=None)


def switched(*interrupted: tuple[int, int, int], prefilled_tokens: int = 0) -> Switched:
    """As an instance says it whose answers go on under another version."""
    return Switched(
        interrupted=list(interrupted),
        prefilled_tokens=prefilled_tokens,
        pause_seconds=0.25,
        resume_seconds=0.5,
        stopped_seconds=1.0,
    )


def plan(**changed: Any) -> GroupPlan:
    """A group's task is its id."""
    told: dict[str, Any] = {
        "partition": PARTITION,
        "columns": COLUMNS.first,
        "by_row": False,
        "rollout": True,
        "max_new_tokens": 4,
        "temperature": 1.0,
        "task_index": lambda group: group,
        "next_task": lambda task: task + 1,
        "seed": lambda trajectory: trajectory,
        "mask_older": False,
        "max_failed_share": 1.0,
    }
    return GroupPlan(**(told | changed))


class Desk:
    """Two instances serve version 0 of a phase; groups of two, batches of one, unless said otherwise."""

    def __init__(
        self,
        *,
        instances: int = 2,
        live_versions: int = 2,
        group_size: int = 2,
        batch_groups: int = 1,
        max_attempts: int = 3,
        policy: StalenessPolicy | None = None,
        **planned: Any,
    ) -> None:
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.peers: dict[str, Peer] = {}
        self.at_once = {"retire_version", "instance_lost"}
        self.failures: list[BaseException] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self.fleet = Fleet(emit=self.emit, spawn=self.spawn, connect=self.connect, temperature=1.0, tolerance=1.0)  # type: ignore[arg-type]  # calls only
        self.units: dict[str, Peer] = {}
        self.ledger = LedgerService(connect=lambda address: self.units.setdefault(address, Peer(address)))  # type: ignore[arg-type]  # calls only
        for number in range(2):
            self.ledger.join(Join(f"storage-{number}.0", f"{number}"))
        self.controller = Controller(emit=self.emit, fleet=self.fleet, ledger=self.ledger, max_attempts=max_attempts)
        self.flow = Flow(
            policy=policy or MultiVersion(MultiVersion.Settings(max_staleness=2)),
            batch_groups=batch_groups,
            group_size=group_size,
            columns=COLUMNS,
        )
        self._instances, self._live_versions, self._plan = instances, live_versions, plan(**planned)

    async def begin(self) -> Desk:
        """Instances join, load version 0, and the phase begins."""
        self.fleet.published(published(0))
        for number in range(self._instances):
            self.join(f"rollout-{number}", live_versions=self._live_versions)
        loading = asyncio.ensure_future(self.fleet.load_everywhere(0))
        await turns()
        for number in range(self._instances):
            self.peers[f"rollout-{number}.0"].answer("load_version", loaded(0))
        await loading
        self.fleet.follow(self.flow)
        self.controller.open_rows(self.flow, phase_partition(PARTITION, COLUMNS, group_size=self.flow.group_size))
        self.controller.begin_phase(self.flow, self._plan)
        return self

    def join(self, name: str, *, start: int = 0, live_versions: int = 2) -> Peer:
        """An instance serves."""
        address = f"{name}.{start}"
        self.fleet.join(name, address, slots=8, live_versions=live_versions, migrates=True)
        return self.peers[address]

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    def told(self, kind: str) -> list[dict[str, Any]]:
        """Events of a kind."""
        return [fields for name, fields in self.events if name == kind]

    def connect(self, address: str) -> Peer:
        return self.peers.setdefault(address, Peer(address, self.at_once))

    def freed(self, unit: str = "storage-0.0") -> list[int]:
        """Rows that a storage unit was asked to forget, ascending."""
        return sorted(row for method, rows in self.units[unit].asked if method == "delete" for row in rows.tolist())

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

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
        """A report arrives, then rows that its worker has put."""
        told = [entry for entry in entries if not isinstance(entry, Note)]
        await self.controller.report(Report(worker=worker, entries=told))
        for note in entries:
            if isinstance(note, Note):
                self.note(msgspec.structs.replace(note, producer=worker))

    def note(self, note: Note, unit: int = 1) -> list[int]:
        """A storage unit is about to keep rows: which of them are refused."""
        (noted,) = self.ledger.note(Notes(unit, [note]))
        if noted.failed is not None:
            raise from_failure(noted.failed)
        refused: list[int] = [] if noted.refused is None else noted.refused.tolist()
        return refused


def finished(item: WorkItem, trajectory: int, versions: Sequence[int] = ()) -> TrajectoryFinished:
    """``versions``: of each token; all three are of the item's, unless said otherwise."""
    tokens = list(versions) or [item.version] * 3
    begins = [t for t in range(len(tokens)) if not t or tokens[t] != tokens[t - 1]]
    return TrajectoryFinished(
        group=item.group,
        trajectory=trajectory,
        spans=[(tokens[start], start, stop) for start, stop in pairwise([*begins, len(tokens)])],
        prompt_tokens=2,
        response_tokens=len(tokens),
        finish_reason="stop",
        started=0.0,
        finished=1.0,
    )


def stored(item: WorkItem, *, rewards: float = 1.0, oldest: Sequence[int] = ()) -> Note:
    """The first columns of a group, as a storage unit tells of them. ``oldest``: the version of each row's oldest
    token."""
    size = len(item.members)
    return Note(
        item.partition,
        np.array([member.trajectory for member in item.members], dtype=np.int64),
        size,
        COLUMNS.first,
        np.full(size, 10, dtype=np.int64),
        np.full(size, 5, dtype=np.int64),
        0,
        {
            VERSION: np.array(oldest or [item.version] * size, dtype=np.int64),
            REWARD: np.full(size, rewards, dtype=np.float32),
        },
    )


def failed(item: WorkItem, reason: str = "ValueError") -> GroupFailed:
    return GroupFailed(group=item.group, trajectory=item.members[0].trajectory, reason=reason, detail="Traceback")


def played(item: WorkItem) -> list[TrajectoryFinished | Note]:
    """Everything a worker says and puts of a group that goes well."""
    return [*(finished(item, member.trajectory) for member in item.members), stored(item)]


async def turns() -> None:
    """Let everything happen that can."""
    for _ in range(TURNS):
        await asyncio.sleep(0)
