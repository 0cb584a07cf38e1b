"""The controller's desk: hands out work, hears what became of it, and tells ``flow``.

It holds counters and ids, never tokens. Invariant: every change of the flow is one event in the log, written
before anybody can act on the change.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np

from headrace.contract import Array
from headrace.dataplane import LedgerService, PartitionSpec
from headrace.errors import HeadraceError, RunError
from headrace.flow import LATE, BatchLease, Flow
from headrace.services.attempts import Attempts
from headrace.services.board import WorkBoard
from headrace.services.failures import FailureShare, gist
from headrace.services.fleet import Fleet
from headrace.services.groups import STORAGE_LOST, GroupPlan, Groups, StoredRows
from headrace.services.messages import (
    Entry,
    EvaluationDone,
    GroupFailed,
    PlaceCall,
    Placement,
    Report,
    Scored,
    ScorerLost,
    TrajectoryFinished,
    WorkItem,
    WorkRequest,
    item_key,
)
from headrace.services.node_messages import Heartbeat, Registration
from headrace.services.rows import PhaseRows
from headrace.services.supervisor import Supervisor
from headrace.services.tally import Tally
from headrace.services.worker import WORK_POLL_SECONDS
from headrace.wire import rpc

LEASE_SECONDS = 3600.0
LAG_ALARM = 2.0
"""Seconds for which an event loop may stand still before a person is told: calls to it wait as long, and time out."""


class Part(NamedTuple):
    """Groups of the next batch; ``last``: all of it, those that were parts before too."""

    lease: BatchLease
    last: bool


class Controller:
    """Serves nodes; the run's loop drives it."""

    def __init__(
        self,
        *,
        emit: Callable[..., Any],
        fleet: Fleet,
        ledger: LedgerService,
        max_failed_share: float = 1.0,
        max_attempts: int = 1,
        notice: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.supervisor: Supervisor | None = None
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.tally = Tally()
        self.attempts = Attempts(max_attempts)
        self._emit = emit
        self._notice = notice
        self._told: set[str] = set()
        """Reasons of failures that whoever watches has read."""
        self._fleet = fleet
        self._ledger = ledger
        self._rows: PhaseRows | None = None
        self._groups: Groups | None = None
        self._board = WorkBoard()
        self._places: list[tuple[PlaceCall, asyncio.Future[Placement]]] = []
        self._evaluation_done: Callable[[EvaluationDone], None] = lambda done: None
        self._batch: asyncio.Future[Part] | None = None
        self._in_parts = False
        self._publishable: asyncio.Future[None] | None = None
        self._max_failed_share = max_failed_share
        self._failures = FailureShare(window=1, limit=max_failed_share)  # nothing is asked for yet
        self._unkept: set[int] = set()
        """Groups of which a storage could not keep rows, until their workers say why."""
        self._slow: set[str] = set()
        """Processes whose event loop stood still; each is told of once."""
        fleet.changed, fleet.loaded, fleet.switched = self.pump, self.tally.loaded, self.tally.switched

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
        self._fleet.heard(beat)
        self.tally.loop_lag = max(self.tally.loop_lag, beat.loop_lag)
        self.tally.parked += beat.parked
        if beat.loop_lag > LAG_ALARM and beat.node not in self._slow:
            self._slow.add(beat.node)
            self._notice(
                f"the event loop of {beat.node} stood still for {beat.loop_lag:.1f} s: calls to it wait as long; "
                "look for a plugin that computes or waits outside of a thread, or for a machine with too few cores"
            )

    @rpc
    async def next_work(self, request: WorkRequest) -> WorkItem | None:
        """The next work item, or None after a while."""
        waiting = self._board.wait(request.worker)
        self.pump()
        try:
            return await asyncio.wait_for(waiting, WORK_POLL_SECONDS)
        except TimeoutError:
            return None

    @rpc
    async def place(self, call: PlaceCall) -> Placement:
        """Where a trajectory goes on whose instance was lost."""
        waiting: asyncio.Future[Placement] = asyncio.get_running_loop().create_future()
        self._places.append((call, waiting))
        self.pump()
        return await waiting

    @rpc
    async def report(self, report: Report) -> None:
        """What happened at a worker, in order. What a worker says after it was given up is too late: others have its
        work. What may not have happened ends the run, not the worker that tells of it."""
        if self._board.is_lost(report.worker):
            return
        try:
            for entry in report.entries:
                self._hear(entry)
        except HeadraceError as error:
            self.fail(error)
        self.pump()

    # ------------------------------------------------------------ phases

    def open_rows(self, flow: Flow, spec: PartitionSpec) -> PhaseRows:
        """The data plane takes rows of ``flow`` from now on, those of an earlier run first."""
        self._rows = PhaseRows(spec, flow, self)
        self._ledger.add(self._rows)
        return self._rows

    @property
    def rows(self) -> PhaseRows:
        """Of the phase that runs, in the data plane."""
        assert self._rows is not None, "no phase is running"
        return self._rows

    def begin_phase(self, flow: Flow, plan: GroupPlan) -> None:
        """From now on work comes from ``flow``, whose rows are open, and back if there were any."""
        self.rows.begin()
        self._groups = Groups(
            flow,
            plan,
            fleet=self._fleet,
            attempts=self.attempts,
            tally=self.tally,
            emit=self._emit,
            free=self._free,
        )
        self._failures = FailureShare(window=flow.batch_groups * flow.group_size, limit=plan.max_failed_share)
        self.pump()

    def end_phase(self, reason: str) -> list[int]:
        """Drop what is outstanding; late reports about it are ignored and their rows freed. Returns the groups."""
        groups = self._require_groups()
        dropped = groups.drop_all(reason)
        self._groups = None
        self._ledger.remove(groups.plan.partition)
        self._board.forget(item_key(group, evaluation=False) for group in dropped)
        return dropped

    @property
    def waits_for_batch(self) -> bool:
        """Whether the trainer could begin, if there were a batch."""
        return self._batch is not None and not self._batch.done()

    async def take_batch(self, *, in_parts: bool = False) -> Part:
        """The next training batch, as soon as the policy allows it; ``in_parts``: before that, groups that are sure to
        be in it, as they come."""
        self._batch, self._in_parts = asyncio.get_running_loop().create_future(), in_parts
        self.pump()
        return await self._batch

    def batch_lost(self, part: Part, unread: Sequence[int]) -> None:
        """Storage lost rows of groups that the trainer has not read: these are dropped."""
        groups, lease = self._require_groups(), part.lease
        groups.flow.release(lease.lease)
        if part.last:
            self._emit(
                "batch_released", version=lease.version, groups=lease.groups, rows=lease.rows, reason=STORAGE_LOST
            )
        groups.lost(unread)
        self.pump()

    async def publishable(self) -> None:
        """Returns when the policy allows the next version."""
        self._publishable = asyncio.get_running_loop().create_future()
        self.pump()
        await self._publishable

    def trained(self, lease: BatchLease, *, applied: bool) -> None:
        """A batch is done with: nobody will read its rows again."""
        self._free(self._require_groups().flow.trained(lease.lease, applied=applied))

    def _free(self, rows: Iterable[int]) -> None:
        if self._rows is not None:
            self._ledger.free(self._rows, np.unique(np.fromiter(rows, dtype=np.int64) // self._rows.spec.group_size))

    # ------------------------------------------------------------ evaluation

    def evaluate(self, items: list[WorkItem], done: Callable[[EvaluationDone], None]) -> None:
        """Queue evaluation items before other work. Outside a phase no batch says how many failures are too many: the
        evaluation's own answers do."""
        if self._groups is None:
            answers = sum(len(item.members) for item in items)
            self._failures = FailureShare(window=answers, limit=self._max_failed_share, of="this evaluation")
        self._evaluation_done = done
        for item in items:
            self._board.put(item)
        self.pump()

    # ------------------------------------------------------------ lost nodes

    def instance_lost(self, displaced: Sequence[int]) -> None:
        """An instance is gone, and these trajectories with it: they go on elsewhere."""
        if self._groups is not None:
            self._groups.displaced(displaced)
        self.pump()

    def worker_lost(self, worker: str) -> None:
        """A worker is gone: others play what it held."""
        for item in self._board.lost(worker):
            if item.kind == "evaluation":
                self._board.put(_evaluation_again(item))
            elif self._groups is not None and (again := self._groups.again(item, "worker_lost")) is not None:
                self._board.put(again)
        self.pump()

    def unit_lost(self, unit: int) -> None:
        """A storage unit is gone, and the rows it held."""
        if self._groups is not None:
            self._groups.lost_unit(unit)
        self.pump()

    def unkept(self, groups: list[int]) -> None:
        """A storage unit could not keep rows of these groups."""
        if self._groups is not None:
            self._unkept.update(filter(self._groups.flow.knows, groups))
            self._groups.lost(groups)
        self.pump()

    # ------------------------------------------------------------ rows

    def stored(self, rows: StoredRows) -> Array:
        """A storage unit is about to keep first columns of rows; int8 [n], 0 for those to keep. What a worker that was
        given up puts is too late, as what it says."""
        if self._groups is None or self._board.is_lost(rows.producer):
            return np.full(len(rows.trajectories), LATE, dtype=np.int8)
        outcome, complete = self._groups.stored(rows)
        for group in complete:
            self._board.done(item_key(group, evaluation=False))
        return outcome

    def staged(self, stage: str, rows: Array, *, started: float, finished: float) -> None:
        """A stage has added its columns to rows."""
        self._emit("stage_finished", stage=stage, rows=rows.tolist(), started=started, finished=finished)

    # ------------------------------------------------------------ the pump

    def pump(self) -> None:
        """Give out whatever has become possible. Called after every change, by whoever made it: an error is the run's,
        not the caller's."""
        try:
            self._fleet.sync()
            self._place()
            if self._groups is not None:
                self._go_on(self._groups.flow)
                self._groups.begin_moves()
            # Last: a batch that is taken makes room for the groups of the next.
            self._board.give(lambda: None if self._groups is None else self._groups.next_item())
        except HeadraceError as error:
            self.fail(error)

    def fail(self, error: HeadraceError) -> None:
        """The run ends with this."""
        if not self.failed.done():
            self.failed.set_exception(error)

    def _go_on(self, flow: Flow) -> None:
        """Let the loop have what it waits for."""
        if self.waits_for_batch and self._batch is not None and (part := self._take(flow)) is not None:
            self._batch.set_result(part)
        if self._publishable is not None and not self._publishable.done() and flow.may_publish():
            self._publishable.set_result(None)

    def _take(self, flow: Flow) -> Part | None:
        now = time.monotonic()
        lease = flow.take_batch(now=now, ttl=LEASE_SECONDS)
        if lease is not None:
            self._emit("batch_taken", version=lease.version, groups=lease.groups, rows=lease.rows)
            self._require_groups().batch_taken()
            return Part(lease, last=True)
        part = flow.take_part(now=now, ttl=LEASE_SECONDS) if self._in_parts else None
        return None if part is None else Part(part, last=False)

    def _place(self) -> None:
        waiting, self._places = self._places, []
        for call, place in waiting:
            if place.done():
                continue
            try:
                placement = self._evaluation_place(call) if call.evaluation else self._group_place(call)
            except RunError as error:
                place.set_exception(error)
                continue
            if placement is None:
                self._places.append((call, place))
            else:
                place.set_result(placement)

    def _group_place(self, call: PlaceCall) -> Placement | None:
        if self._groups is None:
            raise RunError(f"group {call.group} is not wanted any more")
        return self._groups.placement(call)

    def _evaluation_place(self, call: PlaceCall) -> Placement | None:
        hosting = self._fleet.hosting(call.version)
        if not hosting:
            return None
        return Placement(instance=hosting[call.trajectory % len(hosting)].address, attempt=call.attempt + 1)

    # ------------------------------------------------------------ reports

    def _hear(self, entry: Entry) -> None:
        match entry:
            case TrajectoryFinished():
                if self._groups is not None and self._groups.finished(entry):
                    self.tally.response_tokens += entry.response_tokens
            case Scored():
                self._count_failures(entry.trajectories, entry.unscored, entry.detail)
            case ScorerLost():
                self._emit("node_stopped", node=f"{entry.node}/scoring", reason=entry.reason)
            case GroupFailed():
                self._group_failed(entry)
            case EvaluationDone():
                if self._board.done(item_key(entry.item, evaluation=True)) is not None:
                    self._evaluation_done(entry)

    def _group_failed(self, entry: GroupFailed) -> None:
        if self._groups is not None and entry.group in self._unkept:  # it is dropped; here is what its storage said
            self._unkept.discard(entry.group)
            size = self._groups.flow.group_size
            self._count_failures(size, {entry.reason: size}, entry.detail)
            return
        item = self._board.done(item_key(entry.group, evaluation=False))
        if self._groups is None or item is None or not self._groups.flow.knows(entry.group):
            return
        count = sum(not self._groups.flow.ledger.is_written(member.trajectory) for member in item.members)
        self._count_failures(count, {entry.reason: count}, entry.detail)
        if (again := self._groups.again(item, entry.reason)) is not None:
            self._board.put(again)

    def _count_failures(self, trajectories: int, failed: Mapping[str, int], detail: str) -> None:
        self.tally.failed.update(failed)
        for reason in failed.keys() - self._told:  # the first of its kind; how many there are is in the metrics
            self._told.add(reason)
            self._notice(f"an answer could not be scored or its episode failed ({reason}): {gist(detail)}")
        try:
            self._failures.record(trajectories=trajectories, failed=failed, detail=detail)
        except RunError as error:
            self.fail(error)

    def _require_groups(self) -> Groups:
        assert self._groups is not None, "no phase is running"
        return self._groups


def _evaluation_again(item: WorkItem) -> WorkItem:
    """The item for another worker. Its requests are other ones: instances may still be answering those of the lost."""
    members = [msgspec.structs.replace(member, attempt=member.attempt + 1) for member in item.members]
    return msgspec.structs.replace(item, members=members)
