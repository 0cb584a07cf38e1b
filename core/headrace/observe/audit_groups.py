"""The audit of groups: dispatched once under a live version, and ended whole, whatever a resume begins anew.

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
    Resumed,
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
    running: bool = False
    """Whether its present try is neither finished nor failed."""
    finished: bool = False
    finish_reason: str = ""
    oldest: int = 0
    """Version of its oldest token."""
    began: int = 0
    """The version that its present try started under."""
    spans: list[tuple[int, int, int]] = field(default_factory=list)
    """Of its finished answer; kept where the policy interrupts."""
    interruptions: list[tuple[int, int]] = field(default_factory=list)
    """(version it was to go on under, tokens so far), of its present try."""
    scored: bool = False
    reward: float | None = None
    """None also when it was judged to have none."""
    rows: list[int] = field(default_factory=list)
    stages: set[str] = field(default_factory=set)
    """That its rows went through."""


@dataclass(slots=True)
class Group:
    """A live group."""

    id: int
    version: int
    phase: PhaseStarted
    members: dict[int, Trajectory] = field(default_factory=dict)
    unfinished: int = 0

    def samples(self, trajectory: int) -> bool:
        """Whether a member is a sample of the policy, rather than a demonstration or the greedy answer."""
        return self.phase.rollout and not (self.phase.greedy and trajectory == max(self.members))

    @property
    def stored(self) -> bool:
        """Whether every member has a row."""
        return all(trajectory.rows for trajectory in self.members.values())


class GroupChecker:
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
        """Row → trajectory, for ever: a row id is never used again, but by a group that a resume begins anew."""
        self.dispatched = 0
        self.trained = 0
        self.dropped: Counter[str] = Counter()
        self._generating: Counter[int] = Counter()
        """Version → groups with an unfinished member."""
        self._last_group = -1
        self._restarted: dict[int, frozenset[int]] = {}
        """Groups that are to be dispatched anew, before any other, and their trajectories."""

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
        self._restarted.clear()

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
        """Nobody is pinned to what is retired. Where the policy interrupts nobody is pinned at all."""
        if self.phase is not None and self.phase.interrupts:
            return
        self._check(
            not self._generating[event.version],
            "window",
            event.seq,
            "version {} retired with {} groups in flight",
            event.version,
            self._generating[event.version],
        )

    # ------------------------------------------------------------ dispatch

    def group_dispatched(self, event: GroupDispatched) -> None:
        """A new group with new members, or one that a resume begins anew with its own, under a live version."""
        phase, seq = self.phase, event.seq
        if phase is None:
            self._check(False, "log", seq, "group {} dispatched before any phase", event.group)
            return
        if not self._check_ids(event):
            return
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

    def _check_ids(self, event: GroupDispatched) -> bool:
        members = self._restarted.pop(event.group, None)
        if members is not None:
            return self._check(
                set(event.trajectories) == members,
                "resume",
                event.seq,
                "group {} begins anew with trajectories {}, before the run was resumed it had {}",
                event.group,
                event.trajectories,
                sorted(members),
            )
        self._check(
            not self._restarted,
            "resume",
            event.seq,
            "new group {} dispatched before the groups {} that were to begin anew",
            event.group,
            list(self._restarted),
        )
        new = self._check(
            event.group > self._last_group and not any(self._known(t) for t in event.trajectories),
            "conservation",
            event.seq,
            "group {} or one of its trajectories was dispatched before",
            event.group,
        )
        self._last_group = max(self._last_group, event.group)
        return new

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

    # ------------------------------------------------------------ the end of a group

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
        self.fates[trajectory.id] = fate
        self._leave(trajectory)

    def _leave(self, trajectory: Trajectory) -> None:
        group = trajectory.group
        if not trajectory.finished:
            self.finished_one(group)
        del self.live[trajectory.id], group.members[trajectory.id]
        if not group.members:
            del self.groups[group.id]

    # ------------------------------------------------------------ resume

    def resumed(self, event: Resumed) -> None:
        """What was in flight is forgotten, to be dispatched anew; everything else that is live is stored, and goes
        through its stages again."""
        waiting, self._restarted = self._restarted, {}
        for id in event.restarted:
            if id in waiting:  # since an earlier resume
                self._restarted[id] = waiting.pop(id)
                continue
            group = self.groups.get(id)
            in_flight = self._check(
                group is not None and not group.stored,
                "resume",
                event.seq,
                "group {} is to begin anew, but it was {}",
                id,
                "stored" if group else "not live: trained, dropped, named before or never dispatched",
            )
            if in_flight and group is not None:
                self._forget(group)
        left = [*waiting, *(group.id for group in self.groups.values() if not group.stored)]
        for trajectory in self.live.values():
            trajectory.stages.clear()
        self._check(not left, "resume", event.seq, "groups {} are neither stored nor among those that begin anew", left)

    def _forget(self, group: Group) -> None:
        self._restarted[group.id] = frozenset(group.members)
        self.dispatched -= len(group.members)
        for trajectory in list(group.members.values()):
            for row in trajectory.rows:
                del self.rows[row]
            self._leave(trajectory)

    # ------------------------------------------------------------ answers come and go

    def finished_one(self, group: Group) -> None:
        """A member has all its tokens, or leaves without them."""
        group.unfinished -= 1
        if group.unfinished == 0:
            self._generating[group.version] -= 1
            if not self._generating[group.version]:
                del self._generating[group.version]

    def unfinish(self, trajectory: Trajectory) -> None:
        """Its answer is thrown away and made again."""
        trajectory.finished = False
        if trajectory.group.unfinished == 0:
            self._generating[trajectory.group.version] += 1
        trajectory.group.unfinished += 1

    # ------------------------------------------------------------ what is left

    def remaining(self) -> Iterator[Trajectory]:
        """Neither trained nor dropped."""
        yield from self.live.values()
