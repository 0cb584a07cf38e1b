"""The audit of phases: a completed run trained all that its phases ask for, and nothing went wrong in it."""

from __future__ import annotations

from headrace.observe.audit_findings import Findings
from headrace.observe.audit_versions import VersionChecker
from headrace.observe.events import BatchTrained, EvaluationFinished, PhaseStarted, RunFinished, RunStarted


class PhaseChecker:
    """Phases come in the order of the job. Each trains as many batches as it says, skipped ones included, or fewer when
    the accuracy that may end it was reached by the version that it ended with.

    In a log that does not name its phases there is nothing that this could be checked against.
    """

    def __init__(self, findings: Findings, versions: VersionChecker) -> None:
        self._check = findings.check
        self._versions = versions
        self._names: list[str] = []
        self._phase: PhaseStarted | None = None
        self._begun = 0
        self._batches = 0
        """Of the phase."""
        self._evaluated: dict[int, EvaluationFinished] = {}
        """By version."""

    def run_started(self, event: RunStarted) -> None:
        """The names."""
        self._names = event.phases

    def phase_started(self, event: PhaseStarted) -> None:
        """The next one, after a whole one."""
        self._phase_ended(event.seq)
        if self._names:
            due = self._names[self._begun] if self._begun < len(self._names) else None
            self._check(
                event.phase == due, "phases", event.seq, "phase {!r} started where {!r} was due", event.phase, due
            )
        self._phase, self._batches = event, 0
        self._begun += 1

    def batch_trained(self, event: BatchTrained) -> None:
        """One more, applied or not."""
        self._batches += 1

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        """Its accuracies may end a phase."""
        self._evaluated[event.version] = event

    def run_finished(self, event: RunFinished) -> None:
        """Completed: after the last phase, and for no reason that would end a run."""
        if event.status != "completed":
            return
        self._phase_ended(event.seq)
        self._check(
            not event.reason, "phases", event.seq, "the run completed, and ended because of this: {}", event.reason
        )
        if self._names:
            self._check(
                self._begun == len(self._names),
                "phases",
                event.seq,
                "the run completed after {} of {} phases",
                self._begun,
                len(self._names),
            )

    def _phase_ended(self, seq: int) -> None:
        phase = self._phase
        if phase is not None and self._names:
            self._check(
                self._batches == phase.steps or (self._batches < phase.steps and self._reached(phase)),
                "phases",
                seq,
                "phase {!r} ended after {} of {} batches; what may end it before: {}",
                phase.phase,
                self._batches,
                phase.steps,
                "{} >= {:g}, which version {} was not evaluated to have".format(*phase.until, self._versions.current)
                if phase.until
                else "nothing",
            )

    def _reached(self, phase: PhaseStarted) -> bool:
        evaluated = self._evaluated.get(self._versions.current)
        if phase.until is None or evaluated is None:
            return False
        metric, at_least = phase.until
        value = {
            "evaluation/greedy_accuracy": evaluated.greedy_accuracy,
            "evaluation/sampled_accuracy": evaluated.sampled_accuracy,
        }.get(metric)
        return value is not None and value >= at_least
