"""The controller's desk: hands out work, hears what became of it, and tells ``flow``.

It holds counters and ids, never tokens. Invariant: every change of the flow is one event in the log, written
before anybody can act on the change.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import RunError
from headrace.flow import BatchLease, Flow, Ticket
from headrace.services.failures import FailureShare
from headrace.services.fleet import Fleet
from headrace.services.messages import (
    EvaluationDone,
    GroupFailed,
    GroupStored,
    Heartbeat,
    Member,
    Registration,
    Report,
    TrajectoryFinished,
    WorkItem,
    WorkRequest,
)
from headrace.services.supervisor import Supervisor
from headrace.services.worker import WORK_POLL_SECONDS
from headrace.wire import rpc

LEASE_SECONDS = 3600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlan:
    """What the desk needs to turn a flow ticket into a work item."""

    rollout: bool
    max_new_tokens: int
    temperature: float
    task_index: Callable[[int], int]
    """Group id → index in the environment's stream."""
    seed: Callable[[int], int]
    """Trajectory id → sampling seed."""
    max_failed_share: float
    """Of the trajectories of a batch, before the run stops."""


@dataclass(slots=True)
class Tally:
    """Counted since the last reading."""

    response_tokens: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    """Trajectories that failed or could not be scored, by reason."""


class Controller:
    """Serves nodes; the run's loop drives it."""

    def __init__(self, *, emit: Callable[..., Any], fleet: Fleet) -> None:
        self.supervisor: Supervisor | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tally = Tally()
        self._emit = emit
        self._fleet = fleet
        self._flow: Flow | None = None
        self._plan: GroupPlan | None = None
        self._evaluations: deque[WorkItem] = deque()
        self._evaluation_done: Callable[[EvaluationDone], None] = lambda done: None
        self._workers: deque[asyncio.Future[WorkItem]] = deque()
        self._batch: asyncio.Future[BatchLease] | None = None
        self._publishable: asyncio.Future[None] | None = None
        self._failures: FailureShare | None = None
        self._to_free: list[int] = []
        fleet.changed = self.pump

    # ------------------------------------------------------------ nodes

    @rpc
    async def register(self, registration: Registration) -> None:
        """A node serves."""
        assert self.supervisor is not None
        self.supervisor.register(registration)

    @rpc
    async def heartbeat(self, beat: Heartbeat) -> None:
        """A node lives."""
        assert self.supervisor is not None
        self.supervisor.heartbeat(beat)

    @rpc
    async def next_work(self, request: WorkRequest) -> WorkItem | None:
        """The next work item, or None after a while."""
        waiting: asyncio.Future[WorkItem] = asyncio.get_running_loop().create_future()
        self._workers.append(waiting)
        self.pump()
        try:
            return await asyncio.wait_for(waiting, WORK_POLL_SECONDS)
        except TimeoutError:
            return None

    @rpc
    async def report(self, report: Report) -> None:
        """What happened at a worker, in order."""
        for entry in report.entries:
            match entry:
                case TrajectoryFinished():
                    self._trajectory_finished(entry)
                case GroupStored():
                    self._group_stored(entry)
                case GroupFailed():
                    self._group_failed(entry)
                case EvaluationDone():
                    self._evaluation_done(entry)
        self.pump()

    # ------------------------------------------------------------ phases

    def begin_phase(self, flow: Flow, plan: GroupPlan) -> None:
        """From now on work comes from ``flow``."""
        self._flow, self._plan = flow, plan
        self._failures = FailureShare(window=flow.batch_groups * flow.group_size, limit=plan.max_failed_share)
        self.pump()

    def end_phase(self, reason: str) -> list[int]:
        """Drop what is outstanding; late reports about it are ignored and their rows freed. Returns the groups."""
        flow = self._require_flow()
        group_size = flow.group_size
        dropped = list(flow.drop_all(reason))
        for group in dropped:
            rows = list(range(group * group_size, (group + 1) * group_size))
            self._emit("group_dropped", group=group, trajectories=rows, reason=reason)
            self._to_free.extend(rows)
        self._flow = None
        return dropped

    async def take_batch(self) -> BatchLease:
        """The next training batch, as soon as the policy allows it."""
        self._batch = asyncio.get_running_loop().create_future()
        self.pump()
        return await self._batch

    async def publishable(self) -> None:
        """Returns when the policy allows the next version."""
        self._publishable = asyncio.get_running_loop().create_future()
        self.pump()
        await self._publishable

    def rows_to_free(self) -> list[int]:
        """Rows no one will read again, once."""
        rows, self._to_free = self._to_free, []
        return rows

    def free(self, rows: tuple[int, ...]) -> None:
        """Remember rows that storage may forget."""
        self._to_free.extend(rows)

    # ------------------------------------------------------------ evaluation

    def evaluate(self, items: list[WorkItem], done: Callable[[EvaluationDone], None]) -> None:
        """Queue evaluation items before other work."""
        self._evaluation_done = done
        self._evaluations.extend(items)
        self.pump()

    # ------------------------------------------------------------ the pump

    def pump(self) -> None:
        """Give out whatever has become possible. Called after every change."""
        self._fleet.sync()
        self._give_work()
        flow = self._flow
        if flow is None:
            return
        if self._batch is not None and not self._batch.done():
            lease = flow.take_batch(now=time.monotonic(), ttl=LEASE_SECONDS)
            if lease is not None:
                self._emit("batch_taken", version=lease.version, groups=lease.groups, rows=lease.rows)
                self._batch.set_result(lease)
        if self._publishable is not None and not self._publishable.done() and flow.may_publish():
            self._publishable.set_result(None)

    def _give_work(self) -> None:
        while self._workers:
            if self._workers[0].done():
                self._workers.popleft()
                continue
            item = self._evaluations.popleft() if self._evaluations else self._next_group()
            if item is None:
                return
            self._workers.popleft().set_result(item)

    def _next_group(self) -> WorkItem | None:
        if self._flow is None or (ticket := self._flow.next_ticket()) is None:
            return None
        item = self._work_item(ticket)
        self._emit(
            "group_dispatched",
            group=ticket.group,
            task=item.members[0].task,
            version=ticket.version,
            trajectories=ticket.trajectories,
        )
        for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True):
            self._emit(
                "trajectory_started",
                trajectory=trajectory,
                group=ticket.group,
                version=ticket.version,
                instance=instance,
                attempt=0,
            )
        return item

    def _work_item(self, ticket: Ticket) -> WorkItem:
        plan = self._plan
        assert plan is not None
        task = plan.task_index(ticket.group)
        cohort = "" if ticket.cohort is None else f"rollout-{ticket.cohort}"
        return WorkItem(
            kind="rollout" if plan.rollout else "demonstration",
            group=ticket.group,
            version=ticket.version,
            split="train",
            members=[
                Member(
                    trajectory=trajectory,
                    task=task,
                    instance=self._fleet.address(instance),
                    seed=plan.seed(trajectory),
                    cohort=cohort,
                    cohort_size=ticket.cohort_sizes.get(instance, 0),
                )
                for trajectory, instance in zip(ticket.trajectories, ticket.instances, strict=True)
            ],
            max_new_tokens=plan.max_new_tokens,
            temperature=plan.temperature,
        )

    # ------------------------------------------------------------ reports

    def _trajectory_finished(self, entry: TrajectoryFinished) -> None:
        flow = self._flow
        if flow is None or not flow.knows(entry.group):
            return
        instance = flow.instance_of(entry.trajectory)
        flow.generated(entry.trajectory)
        self.tally.response_tokens += entry.response_tokens
        self._emit(
            "trajectory_finished",
            trajectory=entry.trajectory,
            group=entry.group,
            instance=instance,
            spans=entry.spans,
            prompt_tokens=entry.prompt_tokens,
            response_tokens=entry.response_tokens,
            finish_reason=entry.finish_reason,
            started=entry.started,
            finished=entry.finished,
        )

    def _group_stored(self, entry: GroupStored) -> None:
        flow = self._flow
        if flow is None or not flow.knows(entry.group):
            self._to_free.extend(entry.trajectories)
            return
        self._count_failures(len(entry.trajectories), entry.unscored, entry.detail)
        rows = zip(entry.trajectories, entry.versions, entry.tokens, entry.nbytes, entry.rewards, strict=True)
        for trajectory, version, tokens, nbytes, reward in rows:
            # The ledger is told first: what it refuses (a duplicate) was stored and logged before.
            if not flow.stored(trajectory, version=version, tokens=tokens, nbytes=nbytes):
                continue
            self._emit("trajectory_scored", trajectory=trajectory, reward=reward)
            self._emit(
                "row_stored",
                row=trajectory,
                trajectory=trajectory,
                group=entry.group,
                version=version,
                nbytes=nbytes,
            )

    def _group_failed(self, entry: GroupFailed) -> None:
        flow = self._flow
        if flow is None or not flow.knows(entry.group):
            return
        self._emit(
            "trajectory_failed",
            trajectory=entry.trajectory,
            group=entry.group,
            reason=entry.reason,
            attempt=0,
        )
        rows = flow.drop_group(entry.group, entry.reason)
        self._emit("group_dropped", group=entry.group, trajectories=rows, reason=entry.reason)
        self._to_free.extend(rows)
        self._count_failures(len(rows), {entry.reason: len(rows)}, entry.detail)

    def _count_failures(self, trajectories: int, failed: Mapping[str, int], detail: str) -> None:
        assert self._failures is not None
        self.tally.failed.update(failed)
        try:
            self._failures.record(trajectories=trajectories, failed=failed, detail=detail)
        except RunError as error:
            if not self.failed.done():
                self.failed.set_exception(error)

    def _require_flow(self) -> Flow:
        assert self._flow is not None, "no phase is running"
        return self._flow
