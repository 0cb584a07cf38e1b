"""Proves from the event log alone that a run kept its promises, or shows where it did not.

The checkers keep their own books and import nothing of ``flow``: what the audit confirms, it has recomputed from
what nodes reported. A clean verdict means that each rule of :data:`RULES` held at every event it applies to.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import MappingProxyType
from typing import Any

from headrace.errors import RunError
from headrace.observe.audit_batches import BatchChecker
from headrace.observe.audit_findings import RULES, Findings, Rule, Violation
from headrace.observe.audit_result import AuditResult
from headrace.observe.audit_trajectories import TrajectoryChecker
from headrace.observe.audit_versions import VersionChecker
from headrace.observe.events import (
    EVENTS_FILE,
    AnyEvent,
    BatchTaken,
    BatchTrained,
    EvaluationFinished,
    EvaluationStarted,
    GroupDispatched,
    GroupDropped,
    InstanceVersion,
    NodeStopped,
    PhaseStarted,
    RowStored,
    RunFinished,
    RunStarted,
    SelfCheck,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryScored,
    TrajectoryStarted,
    VersionPublished,
    VersionRetired,
    read_events,
)

__all__ = ["RULES", "AuditResult", "Rule", "Violation", "audit_run"]


def audit_run(path: str | Path) -> AuditResult:
    """Audit a run directory or an event log, in one pass. RunError when it cannot be read."""
    path = Path(path)
    events = path / EVENTS_FILE if path.is_dir() else path
    if not events.is_file():
        raise RunError(
            f"no event log at {events}",
            origin=str(path),
            fix="name the directory of a run; `headrace run` prints it at the start and at the end",
        )
    reader = read_events(events)
    auditor = _Auditor()
    for event in reader:
        auditor.see(event)
    if not auditor.events:
        cut = " but half a line" if reader.cut_short else ""
        raise RunError(
            f"the event log {events} holds no event{cut}",
            origin=str(path),
            fix="the run ended before it began: read its logs",
        )
    return auditor.result(cut_short=reader.cut_short)


class _Auditor:
    """Passes each event to the checkers that have a rule for it."""

    def __init__(self) -> None:
        self._findings = Findings()
        self._versions = VersionChecker(self._findings)
        self._trajectories = TrajectoryChecker(self._findings, self._versions)
        self._batches = BatchChecker(self._findings, self._versions, self._trajectories)
        self.events = 0
        """Seen so far."""
        self._start: RunStarted | None = None
        self._end: RunFinished | None = None
        self._phases: list[PhaseStarted] = []
        self._self_check: float | None = None
        self._first_time = self._last_time = 0.0
        versions, trajectories, batches = self._versions, self._trajectories, self._batches
        self._handlers: dict[type, tuple[Callable[[Any], None], ...]] = {
            RunStarted: (self._run_started,),
            PhaseStarted: (self._phases.append, versions.phase_started, trajectories.phase_started),
            NodeStopped: (versions.node_stopped,),
            InstanceVersion: (versions.instance_version,),
            VersionPublished: (versions.version_published, trajectories.version_published),
            VersionRetired: (versions.version_retired, trajectories.version_retired),
            GroupDispatched: (trajectories.group_dispatched,),
            TrajectoryStarted: (trajectories.trajectory_started,),
            TrajectoryFinished: (trajectories.trajectory_finished,),
            TrajectoryFailed: (trajectories.trajectory_failed,),
            TrajectoryScored: (trajectories.trajectory_scored,),
            RowStored: (trajectories.row_stored,),
            GroupDropped: (trajectories.group_dropped,),
            BatchTaken: (batches.batch_taken,),
            BatchTrained: (batches.batch_trained,),
            SelfCheck: (self._self_checked,),
            EvaluationStarted: (versions.evaluation_started,),
            EvaluationFinished: (versions.evaluation_finished,),
            RunFinished: (self._run_finished,),
        }

    def see(self, event: AnyEvent) -> None:
        """The next event of the log."""
        if event.seq == self.events and event.epoch == 0 and self._start and not self._end:
            self._findings.checked["log"] += 1
        else:
            self._check_order(event)
        self._last_time = event.time
        self.events = event.seq + 1
        for handle in self._handlers.get(type(event), ()):
            handle(event)

    def _check_order(self, event: AnyEvent) -> None:
        check = self._findings.check
        check(event.seq == self.events, "log", event.seq, "seq {} where {} was due", event.seq, self.events)
        check(event.epoch == 0, "log", event.seq, "epoch {} of a run that was never resumed", event.epoch)
        check(self._end is None, "log", event.seq, "an event after run_finished")
        if not self._start:
            check(isinstance(event, RunStarted), "log", event.seq, "the log does not begin with run_started")
            self._first_time = self._first_time or event.time

    # ------------------------------------------------------------ the run

    def _run_started(self, event: RunStarted) -> None:
        self._findings.check(self._start is None, "log", event.seq, "a second run_started")
        self._start = event

    def _self_checked(self, event: SelfCheck) -> None:
        if event.max_abs_logprob_diff is not None:
            self._self_check = max(self._self_check or 0.0, event.max_abs_logprob_diff)

    def _run_finished(self, event: RunFinished) -> None:
        """A completed run leaves nothing behind."""
        self._end = event
        if event.status != "completed":
            return
        check, left = self._findings.check, list(self._trajectories.remaining())
        stored = sum(bool(trajectory.rows) for trajectory in left)
        check(
            not left,
            "conservation",
            event.seq,
            "the run completed with {} trajectories buffered and {} in flight",
            stored,
            len(left) - stored,
        )
        check(self._batches.taken is None, "batch", event.seq, "the run completed with a batch taken and not trained")
        open_evaluations = sorted(self._versions.open_evaluations)
        check(
            not open_evaluations,
            "evaluation",
            event.seq,
            "the run completed with evaluations of versions {} unfinished",
            open_evaluations,
        )

    # ------------------------------------------------------------ the verdict

    def result(self, *, cut_short: bool) -> AuditResult:
        """After the last event."""
        books, batches, versions = self._trajectories, self._batches, self._versions
        left = list(books.remaining())
        buffered = sum(bool(trajectory.rows) for trajectory in left)
        in_flight = len(left) - buffered
        dropped = sum(books.dropped.values())
        self._findings.check(
            books.dispatched == books.trained + buffered + in_flight + dropped,
            "conservation",
            self.events - 1,
            "dispatched {} ≠ trained {} + buffered {} + in flight {} + dropped {}",
            books.dispatched,
            books.trained,
            buffered,
            in_flight,
            dropped,
        )
        summary = {
            "job": self._start.job if self._start else "",
            "events": self.events,
            "seconds": self._last_time - self._first_time,
            "status": self._end.status if self._end else None,
            "cut_short": cut_short,
            "dispatched": books.dispatched,
            "trained": books.trained,
            "buffered": buffered,
            "in_flight": in_flight,
            "dropped": dict(sorted((+books.dropped).items())),
            "failed_attempts": dict(sorted(books.failed.items())),
            "scored": books.scored,
            "mean_reward": books.reward_sum / books.scored if books.scored else None,
            "late_reports": books.late,
            "unscored": batches.unscored,
            "batches": batches.trained,
            "skipped_batches": batches.skipped,
            "optimizer_steps": batches.optimizer_steps,
            "versions_published": versions.published,
            "evaluations": versions.evaluations,
            "staleness": {phase: dict(sorted(counts.items())) for phase, counts in batches.staleness.items()},
            "max_staleness": {phase.phase: phase.max_staleness for phase in self._phases},
            "self_check": self._self_check,
        }
        return AuditResult(
            violations=tuple(self._findings.violations),
            violated=MappingProxyType(dict(self._findings.violated)),
            checked=MappingProxyType(dict(self._findings.checked)),
            summary=MappingProxyType(summary),
        )
