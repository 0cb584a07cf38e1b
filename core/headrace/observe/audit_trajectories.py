"""The audit of trajectories from dispatch to storage: one version each, nothing lost on the way.

A group is *live* from its dispatch until it is trained or dropped; a live trajectory is *in flight* until its first
row is stored and *buffered* afterwards. The module keeps these books from the events and never asks ``flow``.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

from headrace.observe.audit_findings import Findings
from headrace.observe.audit_versions import VersionChecker
from headrace.observe.events import (
    GroupDispatched,
    GroupDropped,
    PhaseStarted,
    RowStored,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryScored,
    TrajectoryStarted,
    VersionPublished,
    VersionRetired,
)

TRAINED = "trained"
DROPPED = "dropped"
SKIPPED = "in a skipped batch"
"""The fates of a trajectory."""

SKIPPED_REASON = "step_skipped"
"""Counted as the drop reason of a batch whose optimiser step was not applied."""


@dataclass(slots=True)
class Trajectory:
    """What the log has said about a live trajectory."""

    id: int
    group: Group
    attempt: int = -1
    instance: str = ""
    finished: bool = False
    finish_reason: str = ""
    oldest: int = 0
    """Version of its oldest token."""
    scored: bool = False
    reward: float | None = None
    """None also when it was judged to have none."""
    rows: list[int] = field(default_factory=list)


@dataclass(slots=True)
class Group:
    """A live group."""

    id: int
    version: int
    phase: PhaseStarted
    members: dict[int, Trajectory] = field(default_factory=dict)
    unfinished: int = 0


class TrajectoryChecker:
    """Books of every group. ``trained``, ``dropped`` and ``dispatched`` count trajectories as their events do,
    independently of the books, so that the conservation law can be checked between them."""

    def __init__(self, findings: Findings, versions: VersionChecker) -> None:
        self._check = findings.check
        self._versions = versions
        self.phase: PhaseStarted | None = None
        self.groups: dict[int, Group] = {}
        self.live: dict[int, Trajectory] = {}
        self.fates: dict[int, str] = {}
        self.rows: dict[int, int] = {}
        """Row → trajectory, for ever: a row id is never used again."""
        self.dispatched = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self.failed: Counter[str] = Counter()
        self.scored = 0
        self.reward_sum = 0.0
        """Of all scored sampled trajectories, trained or not."""
        self.late = 0
        """Reports about trajectories that had been dropped."""
        self._generating: Counter[int] = Counter()
        """Version → groups with an unfinished member."""
        self._last_group = -1

    # ------------------------------------------------------------ phases and versions

    def phase_started(self, event: PhaseStarted) -> None:
        """Nothing crosses the border between two phases."""
        self._check(
            not self.groups,
            "conservation",
            event.seq,
            "phase {!r} starts while {} groups of an earlier phase are neither trained nor dropped",
            event.phase,
            len(self.groups),
        )
        self.phase = event

    def version_published(self, event: VersionPublished) -> None:
        """The window: no generation may be under way that could never be trained within the bound."""
        if self.phase is None or not self._generating:
            return
        oldest = min(self._generating)
        self._check(
            event.version - oldest <= self.phase.max_staleness,
            "window",
            event.seq,
            "version {} published while version {} is in flight, max_staleness {}",
            event.version,
            oldest,
            self.phase.max_staleness,
        )

    def version_retired(self, event: VersionRetired) -> None:
        """Nobody is pinned to what is retired."""
        self._check(
            not self._generating[event.version],
            "window",
            event.seq,
            "version {} retired with {} groups in flight",
            event.version,
            self._generating[event.version],
        )

    # ------------------------------------------------------------ groups

    def group_dispatched(self, event: GroupDispatched) -> None:
        """A new group with new members, under a live version."""
        phase, seq = self.phase, event.seq
        if phase is None:
            self._check(False, "log", seq, "group {} dispatched before any phase", event.group)
            return
        new = self._check(
            event.group > self._last_group and not any(self._known(t) for t in event.trajectories),
            "conservation",
            seq,
            "group {} or one of its trajectories was dispatched before",
            event.group,
        )
        if not new:
            return
        self._last_group = event.group
        self._check(
            len(set(event.trajectories)) == len(event.trajectories) == phase.group_size,
            "whole_groups",
            seq,
            "group {} has {} trajectories, group_size is {}",
            event.group,
            len(set(event.trajectories)),
            phase.group_size,
        )
        if phase.rollout:
            self._check(
                self._versions.live(event.version),
                "window",
                seq,
                "group {} dispatched under version {}, which is not live",
                event.group,
                event.version,
            )
        self._admit(event, phase)

    def _known(self, trajectory: int) -> bool:
        return trajectory in self.live or trajectory in self.fates

    def _admit(self, event: GroupDispatched, phase: PhaseStarted) -> None:
        group = Group(event.group, event.version, phase)
        for id in event.trajectories:
            group.members[id] = self.live[id] = Trajectory(id, group, oldest=event.version)
        group.unfinished = len(group.members)
        self.groups[event.group] = group
        self.dispatched += len(event.trajectories)
        self._generating[event.version] += 1
        self._check(
            len(self._generating) <= phase.max_staleness + 1,
            "window",
            event.seq,
            "{} versions in flight, max_staleness {}",
            len(self._generating),
            phase.max_staleness,
        )

    def group_dropped(self, event: GroupDropped) -> None:
        """A live group, whole; or one whose batch was skipped, which then has its reason."""
        if event.trajectories and all(self.fates.get(t) == SKIPPED for t in event.trajectories):
            self._rename_skipped(event)
            return
        group = self.groups.get(event.group)
        if group is None:
            fates = sorted({self.fates.get(t, "never dispatched") for t in event.trajectories})
            self._check(
                False, "conservation", event.seq, "group {} dropped, but it was {}", event.group, " and ".join(fates)
            )
            return
        self._check(
            set(event.trajectories) == set(group.members),
            "whole_groups",
            event.seq,
            "group {} dropped with {} of its {} trajectories",
            event.group,
            len(set(event.trajectories) & set(group.members)),
            len(group.members),
        )
        self.dropped[event.reason] += len(event.trajectories)
        for trajectory in list(group.members.values()):
            self.end(trajectory, DROPPED)

    def _rename_skipped(self, event: GroupDropped) -> None:
        self.dropped[SKIPPED_REASON] -= len(event.trajectories)
        self.dropped[event.reason] += len(event.trajectories)
        self.fates.update(dict.fromkeys(event.trajectories, DROPPED))

    def end(self, trajectory: Trajectory, fate: str) -> None:
        """Close a trajectory's book, and its group's with the last one."""
        group = trajectory.group
        if not trajectory.finished:
            self._finished_one(group)
        del self.live[trajectory.id], group.members[trajectory.id]
        self.fates[trajectory.id] = fate
        if not group.members:
            del self.groups[group.id]

    def _finished_one(self, group: Group) -> None:
        group.unfinished -= 1
        if group.unfinished == 0:
            self._generating[group.version] -= 1
            if not self._generating[group.version]:
                del self._generating[group.version]

    # ------------------------------------------------------------ trajectories

    def _find(self, id: int, seq: int, what: str) -> Trajectory | None:
        """A live trajectory. What a dropped one still reports is late, and no fault."""
        found = self.live.get(id)
        if found is None and self.fates.get(id) == DROPPED:
            self.late += 1
            return None
        fate = self.fates.get(id, "never dispatched")
        self._check(found is not None, "conservation", seq, "trajectory {} {}, but it was {}", id, what, fate)
        return found

    def trajectory_started(self, event: TrajectoryStarted) -> None:
        """On its ticket's version, on an instance that has it, one try at a time."""
        seq, version = event.seq, event.version
        found = self._find(event.trajectory, seq, "started")
        if found is None:
            return
        group = found.group
        self._check(
            version == group.version and event.group == group.id,
            "one_version",
            seq,
            "trajectory {} started for group {} under version {}, its ticket is group {}, version {}",
            event.trajectory,
            event.group,
            version,
            group.id,
            group.version,
        )
        self._check(
            event.attempt > found.attempt and not found.rows,
            "conservation",
            seq,
            "trajectory {} started again as attempt {} after attempt {}",
            event.trajectory,
            event.attempt,
            found.attempt,
        )
        if group.phase.rollout:
            self._check(
                self._versions.serves(event.instance, version),
                "weights",
                seq,
                "trajectory {} started on {!r} under version {} before the instance committed it",
                event.trajectory,
                event.instance,
                version,
            )
        if found.finished:
            self._unfinish(found)
        found.attempt, found.instance = event.attempt, event.instance

    def _unfinish(self, trajectory: Trajectory) -> None:
        """Its answer is thrown away and made again."""
        trajectory.finished = False
        if trajectory.group.unfinished == 0:
            self._generating[trajectory.group.version] += 1
        trajectory.group.unfinished += 1

    def trajectory_finished(self, event: TrajectoryFinished) -> None:
        """Once per try, where it was running, with tokens of one version."""
        found = self._find(event.trajectory, event.seq, "finished")
        if found is None:
            return
        running = found.attempt >= 0 or not found.group.phase.rollout
        ok = self._check(
            running and not found.finished and event.instance == found.instance and event.group == found.group.id,
            "conservation",
            event.seq,
            "trajectory {} of group {} finished on {!r}; the log has it in group {} on {!r}, attempt {}, finished: {}",
            event.trajectory,
            event.group,
            event.instance,
            found.group.id,
            found.instance,
            found.attempt,
            found.finished,
        )
        if not ok:
            return
        found.finished, found.finish_reason = True, event.finish_reason
        self._finished_one(found.group)
        self._spans(found, event)

    def _spans(self, found: Trajectory, event: TrajectoryFinished) -> None:
        """Recomputes the version of the oldest token; a demonstration has no sampled token."""
        ticket, position, contiguous = found.group.version, 0, True
        versions = {ticket}
        for version, start, stop in event.spans:
            contiguous &= start == position and stop > start
            position = stop
            versions.add(version)
        self._check(
            len(versions) == 1,
            "one_version",
            event.seq,
            "trajectory {} has tokens of versions {}, its ticket is version {}",
            event.trajectory,
            sorted({version for version, _, _ in event.spans}),
            ticket,
        )
        expected = event.response_tokens if found.group.phase.rollout else 0
        self._check(
            contiguous and position == expected,
            "one_version",
            event.seq,
            "the spans of trajectory {} cover {} of its {} tokens: {}",
            event.trajectory,
            position,
            expected,
            event.spans,
        )
        found.oldest = min((version for version, _, _ in event.spans), default=ticket)

    def trajectory_failed(self, event: TrajectoryFailed) -> None:
        """Counted; the next attempt, or the drop of its group, shows what became of it."""
        self.failed[event.reason] += 1
        self._find(event.trajectory, event.seq, "failed")

    def trajectory_scored(self, event: TrajectoryScored) -> None:
        """Remembered for the batch."""
        if found := self._find(event.trajectory, event.seq, "scored"):
            found.scored, found.reward = True, event.reward
            if event.reward is not None and found.group.phase.rollout:
                self.scored += 1
                self.reward_sum += event.reward

    def row_stored(self, event: RowStored) -> None:
        """A new row of a live trajectory, claiming its version. Unlike other reports this one may not come late: the
        row would be lost."""
        found = self.live.get(event.trajectory)
        ok = self._check(
            found is not None and event.row not in self.rows,
            "conservation",
            event.seq,
            "row {} stored twice, or for trajectory {} which was {}",
            event.row,
            event.trajectory,
            self.fates.get(event.trajectory, "never dispatched"),
        )
        if not ok or found is None:
            return
        self._check(
            event.version == found.group.version and event.group == found.group.id,
            "one_version",
            event.seq,
            "row {} claims group {} and version {}, its ticket is group {}, version {}",
            event.row,
            event.group,
            event.version,
            found.group.id,
            found.group.version,
        )
        self.rows[event.row] = event.trajectory
        found.rows.append(event.row)

    # ------------------------------------------------------------ what is left

    def remaining(self) -> Iterator[Trajectory]:
        """Neither trained nor dropped."""
        yield from self.live.values()
