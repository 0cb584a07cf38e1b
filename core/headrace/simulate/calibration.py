"""What things cost, measured in a real run: its event log and its metrics, as ``[simulation]`` would write them.

Invariant: what was not measured is not guessed; it keeps the value that the job gives it.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from headrace.config import SimulationConfig, load_resolved
from headrace.contract import Array
from headrace.errors import RunError
from headrace.graph.declared import rollout_capabilities
from headrace.observe.epochs import standing_events
from headrace.observe.events import (
    AnyEvent,
    BatchTaken,
    BatchTrained,
    EvaluationFinished,
    InstanceVersion,
    PhaseStarted,
    RowStored,
    TrajectoryFinished,
    TrajectoryStarted,
    VersionPublished,
)
from headrace.observe.records import read_metrics
from headrace.simulate.lengths import Lengths, Recorded

FEWEST = 4
"""Batches that a calibration needs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """``costs``: keys of ``[simulation]`` that were measured. ``step_seconds``: the run's own time from one publication
    to the next, mean, to be compared with what the simulator predicts for the same job."""

    costs: dict[str, float]
    lengths: Lengths
    step_seconds: float
    batches: int

    def over(self, written: SimulationConfig) -> SimulationConfig:
        """Costs as measured; a key that the job writes stays as it is written."""
        measured = {key: cost for key, cost in self.costs.items() if key not in written.model_fields_set}
        return written.model_copy(update=measured)


@dataclass(slots=True)
class _Phase:
    """What a phase's events say. Seconds are unix time."""

    started: PhaseStarted
    finished: list[TrajectoryFinished] = field(default_factory=list)
    sent: dict[int, float] = field(default_factory=dict)
    """Trajectory → when it was sent to the instance that finished it."""
    stored: dict[int, float] = field(default_factory=dict)
    """Group → when its last row was stored."""
    taken: dict[int, float] = field(default_factory=dict)
    """Version → when its batch was."""
    trained: dict[int, BatchTrained] = field(default_factory=dict)
    published: dict[int, float] = field(default_factory=dict)
    committed: list[tuple[int, float]] = field(default_factory=list)
    evaluations: list[EvaluationFinished] = field(default_factory=list)

    def is_evaluating(self, start: float, stop: float) -> bool:
        """Whether held-out prompts, of which no event tells one by one, took slots in this time."""
        return any(each.started < stop and start < each.finished for each in self.evaluations)

    def hear(self, event: AnyEvent) -> None:
        match event:
            case TrajectoryStarted():
                self.sent[event.trajectory] = event.time
            case TrajectoryFinished():
                self.finished.append(event)
            case RowStored():
                self.stored[event.group] = event.time
            case BatchTaken():
                self.taken[event.version] = event.time
            case BatchTrained():
                self.trained[event.version] = event
            case VersionPublished():
                self.published[event.version] = event.time
            case InstanceVersion():
                self.committed.append((event.version, event.time))
            case EvaluationFinished():
                self.evaluations.append(event)


def calibrate(run: Path) -> Calibration:
    """Read the last phase of a run that rolled out. RunError when there is none, or it is too short."""
    phase = _last_rollout(run)
    batches = [phase.trained[version] for version in sorted(phase.trained) if version + 1 in phase.published]
    if len(batches) < FEWEST:
        raise RunError(
            f"{run} has {len(batches)} trained batches in a phase that rolls out; a calibration needs {FEWEST}",
            fix="let the run go on for longer, or name another",
        )
    job = load_resolved(run / "job.json", directory=str(run))
    slots = rollout_capabilities(job.rollout.spec).slots
    costs = {**_decoding(phase, slots), **_training(phase, batches), **_weights(run, phase, batches)}
    last, first = phase.published[batches[-1].version + 1], phase.published[batches[0].version + 1]
    return Calibration(
        costs=costs,
        lengths=Recorded(np.array([event.response_tokens for event in phase.finished], dtype=np.float64)),
        step_seconds=(last - first) / (len(batches) - 1),
        batches=len(batches),
    )


def _last_rollout(run: Path) -> _Phase:
    phase: _Phase | None = None
    current: _Phase | None = None
    for event in standing_events(run):
        if isinstance(event, PhaseStarted):
            current = _Phase(event) if event.rollout else None
            phase = current or phase
        elif current is not None:
            current.hear(event)
    if phase is None:
        raise RunError(f"{run} has no phase that rolled out", fix="calibrate with a run that samples from a policy")
    return phase


# ---------------------------------------------------------------- decoding


def _decoding(phase: _Phase, slots: int) -> dict[str, float]:
    """A request takes ``latency + tokens · (step + (running - 1) · per_request)``, running being the mean number of
    requests in slots meanwhile: fitted by least squares over the trajectories that shared no slots with an evaluation.
    """
    of_instance: defaultdict[str, list[TrajectoryFinished]] = defaultdict(list)
    for event in phase.finished:
        of_instance[event.instance].append(event)
    spans = [_in_slots(events, slots) for events in of_instance.values()]
    begun, finished, running, tokens = (np.concatenate(parts) for parts in zip(*spans, strict=True))
    alone = np.array([not phase.is_evaluating(*span) for span in zip(begun, finished, strict=True)])
    if alone.any():
        begun, finished, running, tokens = begun[alone], finished[alone], running[alone], tokens[alone]
    seconds, full = finished - begun, _full_step(phase, instances=len(of_instance), slots=slots)
    load = (running - 1) / max(1, slots - 1)
    if full is None:
        step, rise, latency = _fit(seconds, [tokens, tokens * load, np.ones(len(tokens))])
    else:
        step, latency = _fit(seconds - full * tokens * load, [tokens * (1 - load), np.ones(len(tokens))])
        rise = max(0.0, full - step)
    messages = [
        (event.started - phase.sent[event.trajectory]) + (event.time - event.finished) for event in phase.finished
    ]
    waits = [phase.stored[group] - done for group, done in _last_tokens(phase).items() if group in phase.stored]
    return {
        "prompt_tokens": round(float(np.mean([event.prompt_tokens for event in phase.finished]))),
        "step_seconds": step,
        "step_seconds_per_request": rise / max(1, slots - 1),
        "request_seconds": latency + max(0.0, float(np.mean(messages))),
        "scoring_seconds": max(0.0, float(np.mean(waits))) if waits else 0.0,
    }


def _full_step(phase: _Phase, *, instances: int, slots: int) -> float | None:
    """Seconds of a decode step with all slots taken, as evaluations show it, which ask for more than there are: their
    answers and what else was generated meanwhile, in steps of all slots, and half a longest answer for the end, in
    which slots become free. None without such an evaluation."""
    lengths = np.array([event.response_tokens for event in phase.finished], dtype=np.float64)
    steps = seconds = 0.0
    for evaluation in phase.evaluations:
        answers = evaluation.prompts * sum(
            accuracy is not None for accuracy in (evaluation.greedy_accuracy, evaluation.sampled_accuracy)
        )
        if answers < instances * slots:
            continue
        others = sum(
            event.response_tokens
            for event in phase.finished
            if evaluation.started < event.finished < evaluation.finished
        )
        steps += (answers * lengths.mean() + others) / (instances * slots) + lengths.max() / 2
        seconds += evaluation.finished - evaluation.started
    return float(seconds / steps) if steps else None


def _last_tokens(phase: _Phase) -> dict[int, float]:
    """Group → when its last token was known."""
    return {event.group: event.time for event in phase.finished}


def _in_slots(events: Sequence[TrajectoryFinished], slots: int) -> tuple[Array, Array, Array, Array]:
    """When each trajectory of an instance got and left its slot, the mean number of requests in slots meanwhile, and
    its tokens. An instance takes them up in the order in which they came, ``slots`` at once."""
    order = sorted(events, key=lambda event: event.started)
    ends = np.sort([event.finished for event in order])
    begun = np.array([event.started for event in order])
    # With all slots taken, the n-th begins when the (n - slots)-th of those before it has ended.
    begun[slots:] = np.maximum(begun[slots:], ends[: max(0, len(ends) - slots)])
    finished = np.array([event.finished for event in order])
    begun = np.minimum(begun, finished)
    times = np.sort(np.concatenate([begun, finished]))
    load = np.searchsorted(np.sort(begun), times, side="right") - np.searchsorted(ends, times, side="right")
    area = np.concatenate([[0.0], np.cumsum(load[:-1] * np.diff(times))])
    seconds = np.maximum(finished - begun, 1e-9)
    running = (np.interp(finished, times, area) - np.interp(begun, times, area)) / seconds
    tokens = np.array([event.response_tokens for event in order], dtype=np.float64)
    return begun, finished, np.maximum(running, 1.0), tokens


def _fit(seconds: Array, columns: Sequence[Array]) -> list[float]:
    """Least squares without a negative coefficient, the first above 0: the best of all choices of columns."""
    best, least = [float(seconds.sum() / columns[0].sum())] + [0.0] * (len(columns) - 1), float("inf")
    rest = range(1, len(columns))
    for chosen in itertools.chain.from_iterable(itertools.combinations(rest, count) for count in range(len(columns))):
        places = (0, *chosen)
        matrix = np.stack([columns[place] for place in places], axis=1)
        found, *_ = np.linalg.lstsq(matrix, seconds)
        error = float(((matrix @ found - seconds) ** 2).sum())
        if (found >= 0).all() and found[0] > 0 and error < least:
            least, best = error, [0.0] * len(columns)
            for place, value in zip(places, found.tolist(), strict=True):
                best[place] = value
    return best


# ---------------------------------------------------------------- training and weights


def _training(phase: _Phase, batches: Sequence[BatchTrained]) -> dict[str, float]:
    """A batch takes ``train_seconds + tokens · per_token``, prompts included, from the moment in which it was taken."""
    tokens_of = {event.trajectory: event.prompt_tokens + event.response_tokens for event in phase.finished}
    tokens = np.array([sum(tokens_of[row] for row in batch.rows) for batch in batches], dtype=np.float64)
    seconds = np.array([batch.time - phase.taken[batch.version] for batch in batches])
    per_token, fixed = _fit(seconds, [tokens, np.ones(len(tokens))])
    return {"train_seconds": fixed, "train_seconds_per_token": per_token}


def _weights(run: Path, phase: _Phase, batches: Sequence[BatchTrained]) -> dict[str, float]:
    """Publication is what lies between the end of a batch and the wish for the next, less the wait for leave."""
    waited = {record.version: record.values["trainer/wait_seconds"] for record in read_metrics(run)}
    published = [
        phase.published[batch.version + 1] - batch.time - (waited[batch.version] - batch.wait_seconds)
        for batch in batches
    ]
    between = [
        phase.taken[batch.version + 1]
        - phase.published[batch.version + 1]
        - phase.trained[batch.version + 1].wait_seconds
        for batch in batches[:-1]
    ]
    travelled = [time - phase.published[version] for version, time in phase.committed if version in phase.published]
    return {
        "publish_seconds": max(0.0, float(np.mean(published)) + float(np.mean(between))),
        "transfer_seconds": max(0.0, float(np.median(travelled))) if travelled else 0.0,
    }
