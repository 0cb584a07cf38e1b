"""The audit of policy versions: published, committed, pinned, retired, and published again when a run is resumed.
Knows nothing of trajectories."""

from __future__ import annotations

from collections import defaultdict

from headrace.observe.audit_findings import Findings
from headrace.observe.events import (
    EvaluationFinished,
    EvaluationStarted,
    InstanceDraining,
    InstanceLeft,
    InstanceVersion,
    NodeStopped,
    PhaseStarted,
    Resumed,
    VersionPublished,
    VersionRetired,
)


class VersionChecker:
    """``current`` is the version the trainer must be working on, counted from the applied batches alone."""

    def __init__(self, findings: Findings) -> None:
        self._check = findings.check
        self.current = 0
        self.newest = -1
        """Published last; -1 before the first."""
        self.open_evaluations: set[int] = set()
        self.evaluations = 0
        self._digests: dict[int, str] = {}
        self._live: set[int] = set()
        self._draining: set[str] = set()
        self._left: set[str] = set()
        """Names, which are never used again in the epoch."""
        self._committed: defaultdict[str, set[int]] = defaultdict(set)

    @property
    def published(self) -> int:
        """How many versions were published."""
        return len(self._digests)

    def live(self, version: int) -> bool:
        """Published and not retired."""
        return version in self._live

    def serves(self, instance: str, version: int) -> bool:
        """Whether the instance had committed the version by now."""
        return version in self._committed[instance]

    def committed(self, instance: str) -> frozenset[int]:
        """What the instance's present process has committed."""
        return frozenset(self._committed[instance])

    def phase_started(self, event: PhaseStarted) -> None:
        """A phase goes on where the last one ended."""
        self._check(
            event.version == self.current,
            "versions",
            event.seq,
            "phase {!r} starts at version {}, the trainer was at {}",
            event.phase,
            event.version,
            self.current,
        )

    def version_published(self, event: VersionPublished) -> None:
        """What is published is what the last applied batch made, once; once more after a resume, and then the same."""
        new = self._check(
            event.version > self.newest,
            "versions",
            event.seq,
            "version {} published after version {}",
            event.version,
            self.newest,
        )
        if new:
            self._check(
                event.version == self.current,
                "versions",
                event.seq,
                "version {} published, but the applied batches make version {}",
                event.version,
                self.current,
            )
        digest = self._digests.setdefault(event.version, event.digest)
        self._check(
            event.digest == digest,
            "weights",
            event.seq,
            "version {} published again with digest {}, before it was {}",
            event.version,
            event.digest,
            digest,
        )
        self.newest = max(self.newest, event.version)
        self._live.add(event.version)

    def version_retired(self, event: VersionRetired) -> None:
        """Retired once, and not under a running evaluation."""
        self._check(
            self.live(event.version),
            "versions",
            event.seq,
            "version {} retired, but it was not live",
            event.version,
        )
        self._check(
            event.version not in self.open_evaluations,
            "window",
            event.seq,
            "version {} retired while it was being evaluated",
            event.version,
        )
        self._live.discard(event.version)

    def instance_version(self, event: InstanceVersion) -> None:
        """An instance holds exactly what was published."""
        published = self._digests.get(event.version)
        self._check(
            event.digest == published,
            "weights",
            event.seq,
            "{} committed version {} with digest {}, published was {}",
            event.instance,
            event.version,
            event.digest,
            published or "no such version",
        )
        present = self._check(
            event.instance not in self._left,
            "drained",
            event.seq,
            "{} committed version {} after it had left",
            event.instance,
            event.version,
        )
        if present:
            self._committed[event.instance].add(event.version)

    def node_stopped(self, event: NodeStopped) -> None:
        """A process that is gone serves nothing; its successor has to commit again."""
        self._committed.pop(event.node, None)

    def instance_left(self, event: InstanceLeft) -> None:
        """It had agreed to leave, and serves nothing from now on."""
        self._check(
            event.instance in self._draining, "drained", event.seq, "{} left and was not draining", event.instance
        )
        self._left.add(event.instance)
        self._committed.pop(event.instance, None)

    def instance_draining(self, event: InstanceDraining) -> None:
        """Once."""
        self._draining.add(event.instance)

    def resumed(self, event: Resumed) -> None:
        """The state has the version that the applied batches made. New processes hold none until it is published."""
        self._check(
            event.version == self.current,
            "resume",
            event.seq,
            "the run goes on at version {}, the applied batches make version {}",
            event.version,
            self.current,
        )
        self.newest = event.version - 1
        self._live.clear()
        self._committed.clear()
        self._draining.clear()
        self._left.clear()
        self.open_evaluations.clear()

    def evaluation_started(self, event: EvaluationStarted) -> None:
        """One evaluation per version, of a live version."""
        self._check(
            self.live(event.version) and event.version not in self.open_evaluations,
            "evaluation",
            event.seq,
            "evaluation of version {}, which is not live or already being evaluated",
            event.version,
        )
        self.open_evaluations.add(event.version)

    def evaluation_finished(self, event: EvaluationFinished) -> None:
        """Its answers came from the version asked for."""
        self.evaluations += 1
        self._check(
            event.version in self.open_evaluations,
            "evaluation",
            event.seq,
            "evaluation of version {} finished without having started",
            event.version,
        )
        self._check(
            event.version_end == event.version,
            "evaluation",
            event.seq,
            "evaluation of version {} has answers of version {}",
            event.version,
            event.version_end,
        )
        self.open_evaluations.discard(event.version)
