"""What a run lost on its way and went on without: nodes that were started again, and epochs that a resume made void."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from headrace.observe.events import (
    NODE_ENDED,
    SCORING,
    AnyEvent,
    GroupDropped,
    NodeStarted,
    NodeStopped,
    Resumed,
    RunFinished,
    TrajectoryFailed,
)

ROLE_OF_REASON: Mapping[str, str] = {
    "instance_lost": "rollout",
    "worker_lost": "environment",
    "storage_lost": "storage",
}
"""Why a trajectory is made again or its group dropped → role of the node whose loss that is."""


@dataclass(slots=True)
class LostNode:
    """A node that did not end with the run."""

    node: str
    at: float
    """Unix seconds."""
    reason: str
    started_again: float | None = None
    """Unix seconds; None: it never was."""
    again: Counter[str] = field(default_factory=Counter)
    """Reason → tries of trajectories that came to nothing with it."""
    dropped: Counter[str] = field(default_factory=Counter)
    """Reason → trajectories that left the run with it."""

    @property
    def replaced(self) -> bool:
        """Its pool had another process in its place at once."""
        return self.node.endswith(SCORING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """A resume that is in force."""

    since: float
    """Unix seconds: of the first event that it made void."""
    at: float
    """Unix seconds."""
    version: int
    void_events: int
    reason: str
    """How the run had ended; empty when it had not said so."""


class Mishaps:
    """Gathers them from the events in order, void ones included."""

    def __init__(self) -> None:
        self.lost: list[LostNode] = []
        self.resumes: list[Resume] = []
        self._roles: dict[str, str] = {}
        self._void_since: float | None = None
        self._last_void: AnyEvent | None = None
        self.handlers: Mapping[type, Callable[..., None]] = {
            NodeStarted: self._started,
            NodeStopped: self._stopped,
            TrajectoryFailed: self._failed,
            GroupDropped: self._dropped,
            Resumed: self._resumed,
        }
        """Of events in force."""

    def void(self, event: AnyEvent) -> None:
        """A void event."""
        if self._void_since is None:
            self._void_since = event.time
        self._last_void = event

    def _started(self, event: NodeStarted) -> None:
        self._roles[event.node] = event.role
        for lost in self.lost:
            if lost.node == event.node and lost.started_again is None:
                lost.started_again = event.time

    def _stopped(self, event: NodeStopped) -> None:
        if event.reason != NODE_ENDED:
            self.lost.append(LostNode(event.node, event.time, event.reason))

    def _failed(self, event: TrajectoryFailed) -> None:
        if lost := self._newest(event.reason):
            lost.again[event.reason] += 1

    def _dropped(self, event: GroupDropped) -> None:
        if lost := self._newest(event.reason):
            lost.dropped[event.reason] += len(event.trajectories)

    def _newest(self, reason: str) -> LostNode | None:
        """The newest loss that has this consequence; None where it follows from no loss."""
        role = ROLE_OF_REASON.get(reason)
        if role is None:
            return None
        return next((lost for lost in reversed(self.lost) if self._roles.get(lost.node) == role), None)

    def _resumed(self, event: Resumed) -> None:
        ended = self._last_void
        self.resumes.append(
            Resume(
                since=event.time if self._void_since is None else self._void_since,
                at=event.time,
                version=event.version,
                void_events=event.seq - event.events,
                reason=ended.reason if isinstance(ended, RunFinished) else "",
            )
        )
        self._void_since = self._last_void = None
