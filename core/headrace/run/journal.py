"""Everything a run writes down, and who is told: events, metrics, evaluations, observers."""

from __future__ import annotations

import time
from typing import Any

from headrace.config import Job
from headrace.hooks import Observer
from headrace.observe.events import EventLog
from headrace.observe.lines import RecordLog
from headrace.observe.observers import ObserverManager
from headrace.observe.records import EvaluationRecord
from headrace.registry import build
from headrace.run.directory import RunDirectory


class Journal:
    """One per run; used in the controller's process only."""

    def __init__(self, directory: RunDirectory, job: Job) -> None:
        self._events = EventLog(directory.events)
        self._metrics = RecordLog(directory.metrics)
        self._evaluations = RecordLog(directory.evaluation)
        self._before: dict[str, EvaluationRecord] = {}
        self._after: dict[str, EvaluationRecord] = {}
        self._rolling_out = False
        self._observers = ObserverManager()
        for spec in job.observers:
            observer = build(spec)
            assert isinstance(observer, Observer)
            self._observers.register(observer, name=spec.use)
        self._observers.run_opened(str(directory.path), job.resolved())

    def emit(self, kind: str, **fields: Any) -> None:
        """Append an event and show it to observers."""
        if kind == "phase_started":
            self._rolling_out = self._rolling_out or fields["rollout"]
        self._observers.event(self._events.emit(kind, **fields))

    def metrics(self, values: dict[str, float], *, phase: str, version: int, step: int) -> None:
        """Append a metrics record and show it to observers."""
        record = {"time": time.time(), "phase": phase, "version": version, "step": step, **values}
        self._metrics.write(record)
        self._observers.metrics(record)

    def evaluation(self, record: EvaluationRecord) -> None:
        """Append an evaluation. The answers shown as "before" are the last ones from before anything was trained on
        generated rows."""
        self._evaluations.write(record)
        if record.mode not in self._before or not self._rolling_out:
            self._before[record.mode] = record
        self._after[record.mode] = record

    def samples(self) -> dict[str, Any]:
        """Sample answers before and after; sampled ones where there are any, since training changes those most."""
        mode = "sampled" if "sampled" in self._after else "greedy"
        return {
            name: [{"prompt": s.prompt, "answer": s.answer, "reward": s.reward} for s in records[mode].samples]
            for name, records in (("samples_before", self._before), ("samples_after", self._after))
            if mode in records
        }

    def finish(self, status: str, reason: str) -> None:
        """The last event."""
        self.emit("run_finished", status=status, reason=reason)
        for log in (self._events, self._metrics, self._evaluations):
            log.close()

    def close(self, status: str, summary: dict[str, Any]) -> None:
        """Tell observers and close them."""
        self._observers.run_closed(status, summary)
