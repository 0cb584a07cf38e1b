"""What a report is drawn from: one pass over each of a run's files, reduced to what a plot needs."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from headrace.errors import RunError
from headrace.observe.epochs import void_events
from headrace.observe.events import (
    BatchTrained,
    EvaluationFinished,
    GroupDropped,
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
    StageFinished,
    TrajectoryFinished,
    TrajectoryMoved,
    VersionPublished,
    read_events,
)
from headrace.observe.records import EvaluationRecord, MetricsRecord, read_evaluations, read_metrics
from headrace.observe.report_mishaps import LostNode, Mishaps, Resume

JOB_FILE = "job.json"
MERGE_AT = 256
"""Intervals kept apart before overlapping ones are joined: memory follows versions, not trajectories."""


Record = TypeVar("Record")


class Interval(NamedTuple):
    """``start`` and ``stop`` in seconds since the run began, and how many things it is the union of."""

    start: float
    stop: float
    size: int = 1


@dataclass(slots=True)
class RunData:
    """A run, as far as it is in force: what a resume made void is left out. Times are seconds since
    ``run_started``."""

    job_name: str = ""
    status: str | None = None
    reason: str = ""
    started: float = 0.0
    """Unix seconds."""
    seconds: float = 0.0
    instances: list[str] = field(default_factory=list)
    """All there ever were."""
    fleet: list[tuple[float, int]] = field(default_factory=list)
    """When the number of rollout processes changed, and to what."""
    scaled: bool = False
    """Whether instances joined or left, rather than being lost and started again."""
    phases: list[PhaseStarted] = field(default_factory=list)
    published: list[tuple[int, float]] = field(default_factory=list)
    version_bytes: list[int] = field(default_factory=list)
    """Of each version that was published, all tensors."""
    fetched_bytes: list[int] = field(default_factory=list)
    """That an instance fetched of a version, each time."""
    trained: list[tuple[int, Interval]] = field(default_factory=list)
    """Version and time of each training batch."""
    waits: list[tuple[int, float, float]] = field(default_factory=list)
    """Version, seconds waited, seconds busy of each training batch."""
    generated: dict[tuple[str, int], list[Interval]] = field(default_factory=dict)
    """(instance, version) → when it was generating with it."""
    staged: dict[str, list[Interval]] = field(default_factory=dict)
    """Stage with a process of its own → when it was at work."""
    evaluations: list[EvaluationFinished] = field(default_factory=list)
    generated_lengths: Counter[int] = field(default_factory=Counter)
    """Response tokens → sampled trajectories."""
    trained_lengths: Counter[int] = field(default_factory=Counter)
    truncated: int = 0
    lost_nodes: list[LostNode] = field(default_factory=list)
    resumes: list[Resume] = field(default_factory=list)
    metrics: list[MetricsRecord] = field(default_factory=list)
    samples: list[EvaluationRecord] = field(default_factory=list)
    job: Mapping[str, Any] = field(default_factory=dict)

    def since_start(self, unix_seconds: float) -> float:
        """A wall-clock time on the run's own clock. A resume, or a node that was started again, may have another idea
        of the time of day."""
        return max(0.0, unix_seconds - self.started)

    @property
    def base_version(self) -> int:
        """The version before anything was trained on generated rows: where the first such phase begins."""
        return next((phase.version for phase in self.phases if phase.rollout), 0)

    @property
    def idle_share(self) -> float | None:
        """Share of the trainer's time spent waiting for a batch, over the whole run."""
        waited, busy = sum(w for _, w, _ in self.waits), sum(b for _, _, b in self.waits)
        return waited / (waited + busy) if waited + busy > 0 else None


def collect(run_dir: Path) -> RunData:
    """Read a run directory. RunError when there is no event log; other files may be absent."""
    data = RunData()
    _Reading(data).read(run_dir)
    if (run_dir / "metrics.jsonl").exists():
        trained = {version for version, _ in data.trained}
        records = (record for record in read_metrics(run_dir) if record.version in trained)
        data.metrics = _newest(records, key=lambda record: (record.phase, record.step))
    if (run_dir / "evaluation.jsonl").exists():
        evaluated = {evaluation.version for evaluation in data.evaluations}
        answers = (record for record in read_evaluations(run_dir) if record.version in evaluated)
        data.samples = _newest(answers, key=lambda record: (record.version, record.mode))
    if (run_dir / JOB_FILE).exists():
        data.job = _job(run_dir / JOB_FILE)
    return data


def _newest(records: Iterable[Record], *, key: Callable[[Record], Hashable]) -> list[Record]:
    """A run that is resumed makes some records again: the later one of the same ``key`` counts."""
    return list({key(record): record for record in records}.values())


def _job(path: Path) -> Mapping[str, Any]:
    try:
        return msgspec.convert(json.loads(path.read_bytes()), dict[str, Any])  # a job may say inf
    except (OSError, ValueError) as error:
        raise RunError(f"{path} does not read as a job: {error}", fix="restore it, or move it away") from error


def merge(intervals: Iterable[Interval], *, gap: float) -> list[Interval]:
    """The union of intervals, in order; those less than ``gap`` apart become one, and sizes add up."""
    merged: list[Interval] = []
    for interval in sorted(intervals):
        if merged and interval.start <= merged[-1].stop + gap:
            last = merged[-1]
            merged[-1] = Interval(last.start, max(last.stop, interval.stop), last.size + interval.size)
        else:
            merged.append(interval)
    return merged


class _Reading:
    """The pass over the event log."""

    def __init__(self, data: RunData) -> None:
        self._data = data
        self._lengths: dict[int, int] = {}
        """Response tokens of trajectories that are neither trained nor dropped."""
        self._rows: dict[int, int] = {}
        """Row → trajectory, of rows that are not trained."""
        self._running: set[str] = set()
        """Rollout nodes that have a process."""
        self._away: defaultdict[int, list[tuple[str, float]]] = defaultdict(list)
        """Trajectory → the instances that it moved away from, and when."""
        self._switched: defaultdict[int, list[tuple[int, float]]] = defaultdict(list)
        """Trajectory → the versions that it went on under in the middle, and from when on."""
        self._generating: defaultdict[tuple[str, int], list[Interval]] = defaultdict(list)

    def read(self, run_dir: Path) -> None:
        data = self._data
        mishaps, void = Mishaps(), void_events(run_dir)
        handlers = {
            RunStarted: self._run_started,
            PhaseStarted: data.phases.append,
            NodeStarted: self._node_started,
            NodeStopped: self._node_stopped,
            Resumed: self._resumed,
            VersionPublished: self._published,
            InstanceVersion: self._loaded,
            InstanceSwitched: self._interrupted,
            TrajectoryMoved: self._moved,
            TrajectoryFinished: self._finished,
            RowStored: self._stored,
            StageFinished: self._staged,
            GroupDropped: self._dropped,
            BatchTrained: self._trained,
            EvaluationFinished: data.evaluations.append,
            InstanceLeft: self._left,
            RunFinished: self._run_finished,
        }
        last = None
        for event in read_events(run_dir):
            last = event
            if event.seq in void:
                mishaps.void(event)
                continue
            for handle in (handlers.get(type(event)), mishaps.handlers.get(type(event))):
                if handle is not None:
                    handle(event)  # type: ignore[operator]  # each takes the events of its own key
        data.lost_nodes, data.resumes = mishaps.lost, mishaps.resumes
        data.seconds = data.since_start(last.time) if last else 0.0
        gap = data.seconds / 2000
        data.generated = {key: merge(found, gap=gap) for key, found in sorted(self._generating.items())}

    def _run_started(self, event: RunStarted) -> None:
        self._data.job_name, self._data.started, self._data.instances = event.job, event.time, [*event.instances]

    def _node_started(self, event: NodeStarted) -> None:
        if event.role != "rollout":
            return
        if event.node not in self._data.instances:
            self._data.instances.append(event.node)
            self._data.scaled = True
        self._running.add(event.node)
        self._count(event.time)

    def _node_stopped(self, event: NodeStopped) -> None:
        if event.node in self._running:
            self._running.discard(event.node)
            self._count(event.time)

    def _resumed(self, event: Resumed) -> None:
        self._running.clear()
        self._count(event.time)

    def _left(self, event: InstanceLeft) -> None:
        self._data.scaled = True

    def _count(self, time: float) -> None:
        self._data.fleet.append((self._data.since_start(time), len(self._running)))

    def _run_finished(self, event: RunFinished) -> None:
        self._data.status, self._data.reason = event.status, event.reason

    def _published(self, event: VersionPublished) -> None:
        self._data.published.append((event.version, self._data.since_start(event.time)))
        self._data.version_bytes.append(event.nbytes)

    def _loaded(self, event: InstanceVersion) -> None:
        self._data.fetched_bytes.append(event.nbytes)

    def _moved(self, event: TrajectoryMoved) -> None:
        if event.trajectory not in self._lengths:
            self._away[event.trajectory].append((event.source, event.time))

    def _interrupted(self, event: InstanceSwitched) -> None:
        for trajectory, _, _ in event.interrupted:
            if trajectory not in self._lengths:
                self._switched[trajectory].append((event.version, event.time))

    def _stretches(self, event: TrajectoryFinished) -> Iterator[tuple[str, int, float]]:
        """Instance and version that it was generated by, and until when; of this try."""
        version = event.spans[0][0]
        for source, at in self._away.pop(event.trajectory, []):
            if at > event.started:
                yield source, version, at
        for newer, at in self._switched.pop(event.trajectory, []):
            if at > event.started:
                yield event.instance, version, at
                version = newer
        yield event.instance, version, event.finished

    def _finished(self, event: TrajectoryFinished) -> None:
        data = self._data
        if not event.spans:
            return
        began = data.since_start(event.started)
        for instance, version, at in self._stretches(event):
            until = data.since_start(at)
            spans = self._generating[instance, version]
            spans.append(Interval(min(began, until), until))
            if len(spans) > MERGE_AT:
                spans[:] = merge(spans, gap=0.0)
            began = until
        data.generated_lengths[event.response_tokens] += 1
        data.truncated += event.finish_reason == "length"
        self._lengths[event.trajectory] = event.response_tokens

    def _stored(self, event: RowStored) -> None:
        self._rows[event.row] = event.trajectory

    def _staged(self, event: StageFinished) -> None:
        data = self._data
        spans = data.staged.setdefault(event.stage, [])
        spans.append(Interval(data.since_start(event.started), data.since_start(event.finished), len(event.rows)))
        if len(spans) > MERGE_AT:
            spans[:] = merge(spans, gap=0.0)

    def _dropped(self, event: GroupDropped) -> None:
        for trajectory in event.trajectories:
            self._lengths.pop(trajectory, None)

    def _trained(self, event: BatchTrained) -> None:
        data = self._data
        span = Interval(data.since_start(event.started), data.since_start(event.finished))
        data.trained.append((event.version, span))
        data.waits.append((event.version, event.wait_seconds, event.finished - event.started))
        trained = {self._rows.pop(row, row) for row in event.rows}
        data.trained_lengths.update(self._lengths.pop(t) for t in trained if t in self._lengths)
