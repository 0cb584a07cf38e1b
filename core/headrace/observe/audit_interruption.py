"""The audit of phases whose policy interrupts: a trajectory may have tokens of several versions, and each must have
been the one that its instance generated under at that time.

Two witnesses are compared: the spans that engines report with an answer, by way of environments, and what instances say
of the answers they were in the middle of when they switched. What an instance says may reach the log after the answer.
"""

from __future__ import annotations

from collections.abc import Sequence

from headrace.observe.audit_findings import Findings
from headrace.observe.audit_groups import GroupChecker, Trajectory
from headrace.observe.audit_versions import VersionChecker
from headrace.observe.events import (
    InstanceLeft,
    InstanceSwitched,
    NodeStopped,
    Resumed,
    TrajectoryFinished,
    TrajectoryStarted,
    VersionRetired,
)

Spans = Sequence[tuple[int, int, int]]


class InterruptionChecker:
    """``interrupted``: answers that went on under a newer version; ``prefilled_again``: tokens computed again."""

    def __init__(self, findings: Findings, versions: VersionChecker, groups: GroupChecker) -> None:
        self._check = findings.check
        self._versions = versions
        self._groups = groups
        self.interrupted = 0
        self.prefilled_again = 0
        self._under: dict[str, int] = {}
        """Instance → the version it generates under."""
        self._former: dict[str, set[int]] = {}
        """Instance → versions that processes of it had committed that are gone: what they finished is told of late."""

    def trajectory_started(self, event: TrajectoryStarted) -> None:
        """Under what its instance generates under."""
        self._under[event.instance] = max(event.version, self._under.get(event.instance, event.version))

    def instance_switched(self, event: InstanceSwitched) -> None:
        """To a version that it has committed; and only trajectories of a policy that interrupts are interrupted."""
        self._check(
            self._versions.serves(event.instance, event.version),
            "interruption",
            event.seq,
            "{!r} switched to version {} before it had committed it",
            event.instance,
            event.version,
        )
        self._under[event.instance] = event.version
        self.interrupted += len(event.interrupted)
        self.prefilled_again += event.prefilled_tokens
        for id, attempt, tokens in event.interrupted:
            found = self._groups.live.get(id)
            known = found is not None or id in self._groups.fates
            self._check(known, "conservation", event.seq, "trajectory {} was interrupted, but never was", id)
            if found is None:
                continue
            self._check(
                found.group.phase.interrupts,
                "one_version",
                event.seq,
                "trajectory {} went on under version {}, in phase {!r} whose policy interrupts nothing",
                id,
                event.version,
                found.group.phase.phase,
            )
            if (found.instance, found.attempt) != (event.instance, attempt):
                continue  # it begins anew by now
            if found.finished:
                self._agree(found, found.spans, event.version, tokens, event.seq)
            else:
                found.interruptions.append((event.version, tokens))

    def finished(self, found: Trajectory, event: TrajectoryFinished) -> None:
        """Its versions rise, each was the instance's own, and the instance tells of the same interruptions."""
        versions = [version for version, _, _ in event.spans]
        self._check(
            versions == sorted(versions),
            "interruption",
            event.seq,
            "trajectory {} has tokens of version {}, one after the other",
            event.trajectory,
            versions,
        )
        former = self._former.get(event.instance, set())
        strange = [v for v in versions if not self._versions.serves(event.instance, v) and v not in former]
        self._check(
            not strange,
            "interruption",
            event.seq,
            "trajectory {} has tokens of versions {}, which {!r} had not committed",
            event.trajectory,
            strange,
            event.instance,
        )
        self._check(
            min(versions, default=found.began) >= found.began,
            "interruption",
            event.seq,
            "trajectory {} has tokens of version {}, when it started its instance generated under {}",
            event.trajectory,
            min(versions, default=found.began),
            found.began,
        )
        for version, tokens in found.interruptions:
            self._agree(found, event.spans, version, tokens, event.seq)
        found.spans = event.spans

    def _agree(self, found: Trajectory, spans: Spans, version: int, tokens: int, seq: int) -> None:
        """What was sampled before an interruption is older than ``version``, and what came after is not."""
        older = sum(stop - start for own, start, stop in spans if own < version)
        self._check(
            older >= tokens and bool(spans) and spans[-1][0] >= version,
            "interruption",
            seq,
            "trajectory {} was interrupted after {} tokens to go on under version {}, and reports {}",
            found.id,
            tokens,
            version,
            spans,
        )

    def version_retired(self, event: VersionRetired) -> None:
        """Nobody generates under it any more."""
        under = {instance for instance, version in self._under.items() if version == event.version}
        phase = self._groups.phase
        if phase is None or not phase.interrupts:
            return
        busy = [t.id for t in self._groups.live.values() if t.running and t.instance in under] if under else []
        self._check(
            not busy,
            "window",
            event.seq,
            "version {} retired while trajectories {} are generated under it",
            event.version,
            busy,
        )

    # ------------------------------------------------------------ instances go

    def node_stopped(self, event: NodeStopped) -> None:
        """Its successor begins with what it commits."""
        if self._under.pop(event.node, None) is not None:
            self._former.setdefault(event.node, set()).update(self._versions.committed(event.node))

    def instance_left(self, event: InstanceLeft) -> None:
        """It generates nothing any more."""
        self._under.pop(event.instance, None)

    def resumed(self, event: Resumed) -> None:
        """All processes are new."""
        self._under.clear()
        self._former.clear()
