"""The audit of the log itself: every line in its place, from the first to the last, through every resume."""

from __future__ import annotations

from collections import Counter
from pathlib import PurePath

from headrace.observe.audit_findings import Findings
from headrace.observe.events import (
    NODE_ENDED,
    AnyEvent,
    CheckpointSaved,
    NodeStopped,
    PhaseStarted,
    Resumed,
    RunFinished,
    RunStarted,
)


class LogChecker:
    """Numbers, epochs, beginning and end; which states were saved, and whether a resume goes on from one of them."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._check = findings.check
        self.start: RunStarted | None = None
        self.end: RunFinished | None = None
        self.phases: list[PhaseStarted] = []
        self.events = 0
        """Seen so far, void ones included."""
        self.epoch = 0
        self.first_time = self.last_time = 0.0
        """Unix seconds."""
        self.lost: Counter[str] = Counter()
        """Node → how often it was lost."""
        self._epoch_began = -1
        """``seq`` of the newest resume."""
        self._saved: set[tuple[int, str, int]] = set()
        """Version, directory name and events of every checkpoint: a run may be moved before it is resumed."""

    # ------------------------------------------------------------ every event

    def order(self, event: AnyEvent) -> None:
        """The next line of the file, void or not."""
        expected = event.seq == self.events and event.epoch == self.epoch and not isinstance(event, Resumed)
        if expected and self.start and not self.end:
            self._findings.checked["log"] += 1
        else:
            self._check_order(event)
        self.last_time = event.time
        self.events = event.seq + 1

    def _check_order(self, event: AnyEvent) -> None:
        check, begins = self._check, isinstance(event, Resumed)
        due = self.epoch + begins
        check(event.seq == self.events, "log", event.seq, "seq {} where {} was due", event.seq, self.events)
        check(event.epoch == due, "log", event.seq, "epoch {} where {} was due", event.epoch, due)
        check(self.end is None, "log", event.seq, "an event after run_finished")
        if begins:
            self.epoch, self._epoch_began = due, event.seq
        if not self.start:
            check(isinstance(event, RunStarted), "log", event.seq, "the log does not begin with run_started")
            self.first_time = self.first_time or event.time

    # ------------------------------------------------------------ the run

    def run_started(self, event: RunStarted) -> None:
        """The first event."""
        self._check(self.start is None, "log", event.seq, "a second run_started")
        self.start = event

    def run_finished(self, event: RunFinished) -> None:
        """The last event."""
        self.end = event

    def phase_started(self, event: PhaseStarted) -> None:
        """Remembered for the summary."""
        self.phases.append(event)

    def node_stopped(self, event: NodeStopped) -> None:
        """What does not end with the run is lost."""
        if event.reason != NODE_ENDED:
            self.lost[event.node] += 1

    # ------------------------------------------------------------ checkpoints

    def checkpoint_saved(self, event: CheckpointSaved) -> None:
        """A state is of this epoch, and older than the report of it. Void ones are heard too: a resume makes the very
        report void that it relies on."""
        true = self._check(
            self._epoch_began < event.events <= event.seq,
            "resume",
            event.seq,
            "a checkpoint claims a state of {} events; this epoch's states have {} to {}",
            event.events,
            self._epoch_began + 1,
            event.seq,
        )
        if true:
            self._saved.add((event.version, PurePath(event.path).name, event.events))

    def resumed(self, event: Resumed) -> None:
        """From a checkpoint that was saved, as it was saved."""
        self._check(
            (event.version, PurePath(event.checkpoint).name, event.events) in self._saved,
            "resume",
            event.seq,
            "the run goes on from {} with version {} and {} events: no such checkpoint was saved",
            event.checkpoint,
            event.version,
            event.events,
        )
