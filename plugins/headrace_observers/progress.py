"""Where a run stands, gathered from its events and metrics. Knows nothing of how it is shown."""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

RECENT_BATCHES = 20
"""Batches over which the trainer's idle share is taken."""


@dataclass(slots=True)
class Phase:
    """The phase that is running."""

    name: str
    number: int
    """From 1."""
    steps: int
    algorithm: str
    max_staleness: int
    batch_groups: int
    group_size: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Held-out accuracies in 0..1."""

    version: int
    greedy: float | None
    sampled: float | None
    failed: Mapping[str, int]
    """Reason → answers that could not be scored."""


class Progress:
    """Fed with what the hooks bring; every event costs a dictionary lookup and little more."""

    def __init__(self, job: Mapping[str, Any]) -> None:
        self.job_name = str(job.get("job", {}).get("name", ""))
        self.model: str | None = job.get("model", {}).get("path")
        """Folder of the model that the run starts from; None: a fresh one."""
        self.phases = len(job.get("phase", ())) or 1
        self.phase: Phase | None = None
        self.step = 0
        """Batches of the phase that are trained."""
        self.version = 0
        self.rewards: list[float] = []
        """Mean reward of every batch that has one."""
        self.latest: Mapping[str, Any] = {}
        """The newest metrics record."""
        self.evaluations: list[Evaluation] = []
        self.evaluating: set[int] = set()
        self.live: set[int] = set()
        """Versions published and not retired."""
        self.nodes: dict[str, None] = {}
        """Those that were started and are not gone, in order."""
        self.lost: set[str] = set()
        """Those that did not end with the run; an instance is not lost any more once it has weights."""
        self.buffered: set[int] = set()
        """Whole groups that wait for a batch."""
        self.dropped: Counter[str] = Counter()
        """Reason → groups."""
        self.failed: Counter[str] = Counter()
        """Reason → tries."""
        self.staleness: list[int] = []
        """Of each group of the newest batch."""
        self._versions: dict[int, int] = {}
        """Group neither taken nor dropped → its version."""
        self._missing: dict[int, int] = {}
        """Group in flight → members without a row."""
        self._batches: deque[tuple[float, float]] = deque(maxlen=RECENT_BATCHES)
        self._handlers = {
            "resumed": self._resumed,
            "phase_started": self._phase_started,
            "node_started": lambda e: self.nodes.setdefault(e["node"]),
            "node_stopped": self._stopped,
            "instance_version": lambda e: self.lost.discard(e["instance"]),
            "version_published": self._published,
            "version_retired": lambda e: self.live.discard(e["version"]),
            "group_dispatched": self._dispatched,
            "trajectory_failed": self._failed,
            "row_stored": self._stored,
            "group_dropped": self._dropped,
            "batch_taken": self._taken,
            "batch_trained": self._trained,
            "evaluation_started": lambda e: self.evaluating.add(e["version"]),
            "evaluation_finished": self._evaluated,
        }

    # ------------------------------------------------------------ what comes in

    def event(self, event: Mapping[str, Any]) -> None:
        """One event of the log."""
        if handle := self._handlers.get(event["kind"]):
            handle(event)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """One metrics record."""
        self.latest = record
        if (reward := self.number("reward/mean")) is not None:
            self.rewards.append(reward)

    def _phase_started(self, event: Mapping[str, Any]) -> None:
        self.phase = Phase(
            name=event["phase"],
            number=self.phase.number + 1 if self.phase else 1,
            steps=event["steps"],
            algorithm=event["algorithm"],
            max_staleness=event["max_staleness"],
            batch_groups=event["batch_groups"],
            group_size=event["group_size"],
        )
        self.step = 0
        self.latest = {}
        self.staleness = []

    def _stopped(self, event: Mapping[str, Any]) -> None:
        self.nodes.pop(event["node"], None)
        if event["reason"] != "ended":
            self.lost.add(event["node"])

    def _resumed(self, event: Mapping[str, Any]) -> None:
        """Every process is new; what was in flight begins anew."""
        self.nodes.clear()
        self.lost.clear()
        self.live.clear()
        self.evaluating.clear()
        for group in event["restarted"]:
            self._missing.pop(group, None)
            self._versions.pop(group, None)

    def _published(self, event: Mapping[str, Any]) -> None:
        self.version = event["version"]
        self.live.add(event["version"])

    def _dispatched(self, event: Mapping[str, Any]) -> None:
        self._missing[event["group"]] = len(event["trajectories"])
        self._versions[event["group"]] = event["version"]

    def _failed(self, event: Mapping[str, Any]) -> None:
        self.failed[event["reason"]] += 1

    def _stored(self, event: Mapping[str, Any]) -> None:
        group = event["group"]
        self._missing[group] -= 1
        if not self._missing[group]:
            del self._missing[group]
            self.buffered.add(group)

    def _dropped(self, event: Mapping[str, Any]) -> None:
        self._missing.pop(event["group"], None)
        self._versions.pop(event["group"], None)
        self.buffered.discard(event["group"])
        self.dropped[event["reason"]] += 1

    def _taken(self, event: Mapping[str, Any]) -> None:
        self.buffered.difference_update(event["groups"])
        self.staleness = [event["version"] - self._versions.pop(group) for group in event["groups"]]

    def _trained(self, event: Mapping[str, Any]) -> None:
        self.step += 1
        self._batches.append((event["wait_seconds"], event["finished"] - event["started"]))

    def _evaluated(self, event: Mapping[str, Any]) -> None:
        self.evaluating.discard(event["version"])
        self.evaluations.append(
            Evaluation(event["version"], event["greedy_accuracy"], event["sampled_accuracy"], event["failed"])
        )
        self.evaluations.sort(key=lambda e: e.version)

    # ------------------------------------------------------------ what can be asked

    def number(self, name: str) -> float | None:
        """A metric of the newest record; None when it is absent or not finite."""
        value = self.latest.get(name)
        return value if isinstance(value, int | float) and abs(value) < float("inf") else None

    @property
    def in_flight(self) -> int:
        """Groups with a member that is not stored."""
        return len(self._missing)

    @property
    def idle_share(self) -> float | None:
        """wait / (wait + busy) of the trainer over its latest batches."""
        waited, busy = sum(wait for wait, _ in self._batches), sum(busy for _, busy in self._batches)
        return waited / (waited + busy) if waited + busy > 0 else None


def sparkline(values: Sequence[float], width: int, *, blocks: str) -> str:
    """``values`` in ``width`` characters, each the mean of its stretch, from the least to the greatest mean."""
    if not values:
        return ""
    width = min(width, len(values))
    edges = [len(values) * i // width for i in range(width + 1)]
    means = [sum(values[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]
    low, span = min(means), max(means) - min(means)
    if span == 0:
        return blocks[0] * width
    return "".join(blocks[min(len(blocks) - 1, int((mean - low) / span * len(blocks)))] for mean in means)
