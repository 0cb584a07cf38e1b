"""The audit of trajectories from start to storage: one version each unless the policy interrupts, one try at a time,
nothing lost on the way."""

from __future__ import annotations

from collections import Counter

from headrace.observe.audit_findings import Findings, Rule
from headrace.observe.audit_groups import DROPPED, GroupChecker, Trajectory
from headrace.observe.audit_interruption import InterruptionChecker
from headrace.observe.audit_versions import VersionChecker
from headrace.observe.events import (
    InstanceLeft,
    RowStored,
    StageFinished,
    TrajectoryFailed,
    TrajectoryFinished,
    TrajectoryMoved,
    TrajectoryScored,
    TrajectoryStarted,
)


class TrajectoryChecker:
    """Follows every member of a live group, and writes what it hears into the group's book."""

    def __init__(
        self, findings: Findings, versions: VersionChecker, groups: GroupChecker, interruptions: InterruptionChecker
    ) -> None:
        self._check = findings.check
        self._versions = versions
        self._groups = groups
        self._interruptions = interruptions
        self.failed: Counter[str] = Counter()
        """Tries that came to nothing, by reason."""
        self.scored = 0
        self.reward_sum = 0.0
        """Of all scored sampled trajectories, trained or not."""
        self.late = 0
        """Reports about trajectories that had been dropped."""
        self.moves = 0
        self.prefilled_again = 0
        """Tokens whose keys and values a target of a move computed again."""

    @property
    def mean_reward(self) -> float | None:
        """None before the first."""
        return self.reward_sum / self.scored if self.scored else None

    def _find(self, id: int, seq: int, what: str) -> Trajectory | None:
        """A live trajectory. What a dropped one still reports is late, and no fault."""
        found = self._groups.live.get(id)
        if found is None and self._groups.fates.get(id) == DROPPED:
            self.late += 1
            return None
        fate = self._groups.fates.get(id, "never dispatched")
        self._check(found is not None, "conservation", seq, "trajectory {} {}, but it was {}", id, what, fate)
        return found

    def trajectory_started(self, event: TrajectoryStarted) -> None:
        """On its ticket's version, or where the policy interrupts a newer one, on an instance that has it, one try at a
        time."""
        seq, version = event.seq, event.version
        found = self._find(event.trajectory, seq, "started")
        if found is None:
            return
        group, newer = found.group, found.group.phase.interrupts and version > found.group.version
        self._check(
            (version == group.version or newer) and event.group == group.id,
            _rule_of(found),
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
            self._groups.unfinish(found)
        found.attempt, found.instance, found.running = event.attempt, event.instance, True
        found.began = version
        found.interruptions.clear()

    def trajectory_moved(self, event: TrajectoryMoved) -> None:
        """Under its version, from where it was to another instance that serves that. Of a trajectory that is done, and
        of a try that has failed, the news may be late."""
        self.moves += 1
        self.prefilled_again += event.prefilled_tokens
        found = self._groups.live.get(event.trajectory)
        known = found is not None or event.trajectory in self._groups.fates
        self._check(known, "conservation", event.seq, "trajectory {} moved, but never was", event.trajectory)
        self._check(
            event.source != event.target
            and self._versions.serves(event.source, event.version)
            and self._versions.serves(event.target, event.version),
            "moves",
            event.seq,
            "trajectory {} moved from {!r} to {!r} under version {}, which not both had committed",
            event.trajectory,
            event.source,
            event.target,
            event.version,
        )
        if found is None:
            return
        self._check(
            event.version == found.group.version and event.group == found.group.id,
            "one_version",
            event.seq,
            "trajectory {} moved as one of group {} under version {}, its ticket is group {}, version {}",
            event.trajectory,
            event.group,
            event.version,
            found.group.id,
            found.group.version,
        )
        if found.finished or event.attempt < found.attempt:
            return
        self._check(
            event.source == found.instance and event.attempt == found.attempt,
            "moves",
            event.seq,
            "trajectory {} moved from {!r} in attempt {}; the log has it on {!r}, attempt {}",
            event.trajectory,
            event.source,
            event.attempt,
            found.instance,
            found.attempt,
        )
        found.instance = event.target

    def trajectory_finished(self, event: TrajectoryFinished) -> None:
        """Once per try, where it was running, with tokens of one version, or of one after the other."""
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
        found.running, found.finished, found.finish_reason = False, True, event.finish_reason
        self._groups.finished_one(found.group)
        self._spans(found, event)

    def _spans(self, found: Trajectory, event: TrajectoryFinished) -> None:
        """Recomputes the version of the oldest token; a demonstration has no sampled token."""
        ticket, position, contiguous = found.group.version, 0, True
        versions = {ticket}
        for version, start, stop in event.spans:
            contiguous &= start == position and stop > start
            position = stop
            versions.add(version)
        if found.group.phase.interrupts:
            self._interruptions.finished(found, event)
        else:
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
            _rule_of(found),
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
        if found := self._find(event.trajectory, event.seq, "failed"):
            found.running = False

    def instance_left(self, event: InstanceLeft) -> None:
        """Nothing was cut."""
        cut = [t.id for t in self._groups.live.values() if t.running and t.instance == event.instance]
        self._check(not cut, "drained", event.seq, "{} left with trajectories {} unfinished", event.instance, cut)

    def trajectory_scored(self, event: TrajectoryScored) -> None:
        """Once; remembered for the batch."""
        if found := self._find(event.trajectory, event.seq, "scored"):
            self._check(
                not found.scored,
                "rewards",
                event.seq,
                "trajectory {} scored {}, before it was {}",
                event.trajectory,
                event.reward,
                found.reward,
            )
            found.scored, found.reward = True, event.reward
            if event.reward is not None and found.group.samples(event.trajectory):
                self.scored += 1
                self.reward_sum += event.reward

    def row_stored(self, event: RowStored) -> None:
        """A new row of a live trajectory, claiming its version. Unlike other reports this one may not come late: the
        row would be lost."""
        found = self._groups.live.get(event.trajectory)
        ok = self._check(
            found is not None and event.row not in self._groups.rows,
            "conservation",
            event.seq,
            "row {} stored twice, or for trajectory {} which was {}",
            event.row,
            event.trajectory,
            self._groups.fates.get(event.trajectory, "never dispatched"),
        )
        if not ok or found is None:
            return
        version = found.oldest if found.group.phase.interrupts else found.group.version
        self._check(
            event.version == version and event.group == found.group.id,
            _rule_of(found),
            event.seq,
            "row {} claims group {} and version {}, it is of group {}, version {}",
            event.row,
            event.group,
            event.version,
            found.group.id,
            version,
        )
        self._groups.rows[event.row] = event.trajectory
        found.rows.append(event.row)

    def stage_finished(self, event: StageFinished) -> None:
        """Of stored rows that have not been through it."""
        for row in event.rows:
            found = self._groups.live.get(self._groups.rows.get(row, -1))
            self._check(
                found is not None and event.stage not in found.stages,
                "stages",
                event.seq,
                "stage {!r} finished row {}, which is not stored or went through it before",
                event.stage,
                row,
            )
            if found is not None:
                found.stages.add(event.stage)


def _rule_of(found: Trajectory) -> Rule:
    """Which rule versions are judged by."""
    return "interruption" if found.group.phase.interrupts else "one_version"
