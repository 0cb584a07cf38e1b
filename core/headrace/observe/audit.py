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
from headrace.observe.audit_agreement import AgreementChecker
from headrace.observe.audit_batches import BatchChecker
from headrace.observe.audit_findings import RULES, Findings, Rule, Violation
from headrace.observe.audit_groups import GroupChecker
from headrace.observe.audit_interruption import InterruptionChecker
from headrace.observe.audit_log import LogChecker
from headrace.observe.audit_phases import PhaseChecker
from headrace.observe.audit_result import AuditResult
from headrace.observe.audit_trajectories import TrajectoryChecker
from headrace.observe.audit_versions import VersionChecker
from headrace.observe.epochs import VoidEvents, void_events
from headrace.observe.events import (
    EVENTS_FILE,
    AnyEvent,
    BatchReleased,
    BatchTaken,
    BatchTrained,
    CheckpointSaved,
    EvaluationFinished,
    EvaluationStarted,
    GroupDispatched,
    GroupDropped,
    InstanceDraining,
    InstanceLeft,
    InstanceSwitched,
    InstanceVersion,
    NodeStarted,
    NodeStopped,
    PhaseStarted,
    Resumed,
    RowStored,
    RunFinished,
    RunStarted,
    SelfCheck,
    StageFinished,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryScored,
    TrajectoryStarted,
    VersionPublished,
    VersionRetired,
    read_events,
)

__all__ = ["RULES", "AuditResult", "Rule", "Violation", "audit_run"]


def audit_run(path: str | Path) -> AuditResult:
    """Audit a run directory or an event log, in one pass; a
    first look at the file finds what is void. RunError when it cannot be read."""
    path = Path(path)
    events = path / EVENTS_FILE if path.is_dir() else path
    if not events.is_file():
        raise RunError(
            f"no event log at {events}",
            origin=str(path),
            fix="name the directory of a run; `headrace run` prints it at the start and at the end",
        )
    reader = read_events(events)
    auditor = _Auditor(void_events(events))
    for event in reader:
        auditor.see(event)
    if not auditor.log.events:
        cut = " but half a line" if reader.cut_short else ""
        raise RunError(
            f"the event log {events} holds no event{cut}",
            origin=str(path),
            fix="the run ended before it began: read its logs",
        )
    return auditor.result(cut_short=reader.cut_short)


class _Auditor:
    """Passes each event to the checkers that have a rule for it."""

    def __init__(self, void: VoidEvents) -> None:
        self._void = void
        self._void_seen = 0
        self._findings = Findings()
        self.log = LogChecker(self._findings)
        self._versions = VersionChecker(self._findings)
        self._groups = GroupChecker(self._findings, self._versions)
        self._interruptions = InterruptionChecker(self._findings, self._versions, self._groups)
        self._trajectories = TrajectoryChecker(self._findings, self._versions, self._groups, self._interruptions)
        self._batches = BatchChecker(self._findings, self._versions, self._groups)
        self._agreement = AgreementChecker(self._findings)
        phases = PhaseChecker(self._findings, self._versions)
        log, versions, groups = self.log, self._versions, self._groups
        trajectories, batches, agreement = self._trajectories, self._batches, self._agreement
        interruptions = self._interruptions
        self._handlers: dict[type, tuple[Callable[[Any], None], ...]] = {
            RunStarted: (log.run_started, phases.run_started),
            PhaseStarted: (log.phase_started, phases.phase_started, versions.phase_started, groups.phase_started),
            NodeStarted: (agreement.node_started,),
            NodeStopped: (log.node_stopped, interruptions.node_stopped, versions.node_stopped),
            InstanceDraining: (versions.instance_draining,),
            InstanceLeft: (versions.instance_left, trajectories.instance_left, interruptions.instance_left),
            InstanceVersion: (versions.instance_version, agreement.instance_version),
            InstanceSwitched: (interruptions.instance_switched,),
            VersionPublished: (versions.version_published, groups.version_published),
            VersionRetired: (versions.version_retired, groups.version_retired, interruptions.version_retired),
            GroupDispatched: (groups.group_dispatched,),
            TrajectoryStarted: (
                trajectories.trajectory_started,
                interruptions.trajectory_started,
                agreement.trajectory_started,
            ),
            TrajectoryMoved: (trajectories.trajectory_moved, agreement.trajectory_moved),
            TrajectoryFinished: (trajectories.trajectory_finished,),
            TrajectoryFailed: (trajectories.trajectory_failed,),
            TrajectoryScored: (trajectories.trajectory_scored,),
            RowStored: (trajectories.row_stored,),
            StageFinished: (trajectories.stage_finished,),
            GroupDropped: (groups.group_dropped,),
            BatchTaken: (batches.batch_taken,),
            BatchReleased: (batches.batch_released,),
            BatchTrained: (batches.batch_trained, phases.batch_trained),
            SelfCheck: (agreement.self_checked,),
            EvaluationStarted: (versions.evaluation_started,),
            EvaluationFinished: (versions.evaluation_finished, phases.evaluation_finished),
            CheckpointSaved: (log.checkpoint_saved,),
            Resumed: (
                log.resumed,
                versions.resumed,
                groups.resumed,
                batches.resumed,
                interruptions.resumed,
                agreement.resumed,
            ),
            RunFinished: (log.run_finished, phases.run_finished, self._run_finished),
        }

    def see(self, event: AnyEvent) -> None:
        """The next event of the log. A void one counts for nothing but the order of the log; that a checkpoint was
        saved is remembered, since the resume that relies on it makes the report of it void."""
        self.log.order(event)
        if event.seq not in self._void:
            for handle in self._handlers.get(type(event), ()):
                handle(event)
            return
        self._void_seen += 1
        if isinstance(event, CheckpointSaved):
            self.log.checkpoint_saved(event)

    # ------------------------------------------------------------ the run

    def _run_finished(self, event: RunFinished) -> None:
        """A completed run leaves nothing behind."""
        if event.status != "completed":
            return
        check, left = self._findings.check, list(self._groups.remaining())
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
        self._agreement.ended()
        log, books, batches, versions = self.log, self._groups, self._batches, self._versions
        left = list(books.remaining())
        buffered = sum(bool(trajectory.rows) for trajectory in left)
        in_flight = len(left) - buffered
        dropped = sum(books.dropped.values())
        self._findings.check(
            books.dispatched == books.trained + buffered + in_flight + dropped,
            "conservation",
            log.events - 1,
            "dispatched {} ≠ trained {} + buffered {} + in flight {} + dropped {}",
            books.dispatched,
            books.trained,
            buffered,
            in_flight,
            dropped,
        )
        summary = {
            "job": log.start.job if log.start else "",
            "events": log.events,
            "void_events": self._void_seen,
            "resumed": log.epoch,
            "seconds": max(0.0, log.last_time - log.first_time),
            "status": log.end.status if log.end else None,
            "cut_short": cut_short,
            "lost_nodes": dict(sorted(log.lost.items())),
            "dispatched": books.dispatched,
            "trained": books.trained,
            "buffered": buffered,
            "in_flight": in_flight,
            "dropped": dict(sorted((+books.dropped).items())),
            "failed_attempts": dict(sorted(self._trajectories.failed.items())),
            "moves": self._trajectories.moves,
            "prefilled_again": self._trajectories.prefilled_again + self._interruptions.prefilled_again,
            "interrupted": self._interruptions.interrupted,
            "mixed": batches.mixed,
            "interrupting": {phase.phase: phase.policy for phase in log.phases if phase.interrupts},
            "scored": self._trajectories.scored,
            "mean_reward": self._trajectories.mean_reward,
            "late_reports": self._trajectories.late,
            "unscored": batches.unscored,
            "batches": batches.trained,
            "skipped_batches": batches.skipped,
            "released_batches": batches.released,
            "optimizer_steps": batches.optimizer_steps,
            "versions_published": versions.published,
            "evaluations": versions.evaluations,
            "staleness": {phase: dict(sorted(counts.items())) for phase, counts in batches.staleness.items()},
            "max_staleness": {phase.phase: phase.max_staleness for phase in log.phases},
            "self_check": self._agreement.largest_gap,
        }
        return AuditResult(
            violations=tuple(self._findings.violations),
            violated=MappingProxyType(dict(self._findings.violated)),
            checked=MappingProxyType(dict(self._findings.checked)),
            summary=MappingProxyType(summary),
        )
