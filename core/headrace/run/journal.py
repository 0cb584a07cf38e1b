"""Everything a run writes down, and who is told: events, metrics, evaluations, observers."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from headrace import clock
from headrace.config import Job
from headrace.errors import RunError
from headrace.hooks import Observer
from headrace.observe.epochs import standing_events
from headrace.observe.event_log import EventLog
from headrace.observe.lines import RecordLog
from headrace.observe.observers import ObserverManager
from headrace.observe.records import EvaluationRecord
from headrace.registry import build
from headrace.run.checkpoint import RunState
from headrace.run.directory import RunDirectory

log = logging.getLogger(__name__)


class Journal:
    """One per run; used in the controller's process only."""

    def __init__(self, directory: RunDirectory, job: Job, *, resumed: RunState | None = None) -> None:
        self._events = EventLog(directory.events) if resumed is None else EventLog.reopen(directory.events)
        self._metrics = RecordLog(directory.metrics, append=resumed is not None)
        self._evaluations = RecordLog(directory.evaluation, append=resumed is not None)
        self.before: dict[str, EvaluationRecord] = {} if resumed is None else dict(resumed.samples_before)
        """The last answers, by mode, from before anything was trained on generated rows."""
        self._after: dict[str, EvaluationRecord] = {}
        self.rolled_out = resumed is not None and resumed.rolled_out
        """Whether anything may have been trained on generated rows."""
        self._observers = ObserverManager()
        for spec in job.observers:
            observer = build(spec)
            assert isinstance(observer, Observer)
            self._observers.register(observer, name=spec.use)
        self._observers.run_opened(str(directory.path), job.resolved())
        if resumed is not None:
            self._observers.run_resumed(lambda: _past(directory.events, resumed.events))

    @property
    def event_count(self) -> int:
        """Events written so far."""
        return self._events.count

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event and show it to observers."""
        if kind == "phase_started":
            self.rolled_out = self.rolled_out or fields["rollout"]
        self._observers.event(self._events.emit(kind, **fields))

    def notice(self, text: str) -> None:
        """Tell whoever watches."""
        self._observers.notice(text)

    def metrics(self, values: dict[str, float], *, phase: str, version: int, step: int) -> None:
        """Append a metrics record and show it to observers."""
        record = {"time": clock.now(), "phase": phase, "version": version, "step": step, **values}
        self._metrics.write(record)
        self._observers.metrics(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Append an evaluation."""
        self._evaluations.write(record)
        if record.mode not in self.before or not self.rolled_out:
            self.before[record.mode] = record
        self._after[record.mode] = record

    def samples(self) -> dict[str, Any]:
        """Sample answers before and after training; sampled ones where there are any, since training changes those
        most. Only those from before when there are no others."""
        mode = "sampled" if "sampled" in self.before else "greedy"
        found = {"samples_before": self.before.get(mode), "samples_after": self._after.get(mode)}
        return {
            name: [{"prompt": s.prompt, "answer": s.answer, "reward": s.reward} for s in record.samples]
            for name, record in found.items()
            if record is not None and (name == "samples_before" or record is not found["samples_before"])
        }

    def finish(self, status: str, reason: str) -> None:
        """The last event. A log that a full disk has ended does without, so that everything else still ends well."""
        try:
            self.emit("run_finished", status=status, reason=reason)
        except RunError as error:
            log.error("the end of the run is not in its event log: %s", error)
        for record_log in (self._events, self._metrics, self._evaluations):
            record_log.close()

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """Tell observers and close them."""
        self._observers.run_closed(status, summary)


def _past(log: Path, count: int) -> Iterator[dict[str, Any]]:
    """The events in force among the first ``count``."""
    for event in standing_events(log):
        if event.seq >= count:
            return
        yield msgspec.to_builtins(event)
