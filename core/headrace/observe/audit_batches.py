"""The audit of training batches: whole groups, the taken batch and no other, the rewards that were reported, within the
bound on staleness."""

from __future__ import annotations

import ctypes
import math
from collections import Counter, defaultdict

from headrace.observe.audit_findings import Findings
from headrace.observe.audit_groups import DROPPED, SKIPPED, SKIPPED_REASON, TRAINED, GroupChecker, Trajectory
from headrace.observe.audit_versions import VersionChecker
from headrace.observe.events import BatchReleased, BatchTaken, BatchTrained, PhaseStarted, Resumed

WHOLE_ANSWERS = frozenset({"stop", "length"})
"""Finish reasons of answers that nobody cut off."""


class BatchChecker:
    """One batch at a time is taken, then trained or released. Staleness is recomputed from the spans that engines
    reported."""

    def __init__(self, findings: Findings, versions: VersionChecker, groups: GroupChecker) -> None:
        self._check = findings.check
        self._versions = versions
        self._groups = groups
        self.taken: BatchTaken | None = None
        self.trained = 0
        self.skipped = 0
        self.released = 0
        self.optimizer_steps = 0
        self.unscored = 0
        """Members of a batch that were judged to have no reward: they keep their group whole and carry no weight."""
        self.mixed = 0
        """Trained rows with tokens of several versions."""
        self.staleness: defaultdict[str, Counter[int]] = defaultdict(Counter)
        """Phase → trained rows by staleness."""

    # ------------------------------------------------------------ taken

    def batch_taken(self, event: BatchTaken) -> None:
        """At the trainer's version, of ready whole groups."""
        phase, seq = self._groups.phase, event.seq
        if phase is None:
            self._check(False, "log", seq, "a batch taken before any phase")
            return
        self._check(self.taken is None, "batch", seq, "a batch taken while another is being trained")
        self._check_version(event, phase)
        self._check(
            len(set(event.groups)) == len(event.groups) == phase.batch_groups,
            "batch",
            seq,
            "a batch of {} groups ({} distinct), batch_groups is {}",
            len(event.groups),
            len(set(event.groups)),
            phase.batch_groups,
        )
        ready = {row for group in event.groups for row in self._rows_of(group, seq)}
        self._check(
            len(event.rows) == len(ready) and set(event.rows) == ready,
            "whole_groups",
            seq,
            "the batch's rows are not the stored rows of its groups: {} missing, {} too many",
            len(ready - set(event.rows)),
            len(event.rows) - len(ready & set(event.rows)),
        )
        self.taken = event

    def _check_version(self, event: BatchTaken, phase: PhaseStarted) -> None:
        published = self._versions.newest == event.version or not phase.rollout
        self._check(
            event.version == self._versions.current and published,
            "versions",
            event.seq,
            "a batch taken at version {}; the trainer is at {}, published last was {}",
            event.version,
            self._versions.current,
            self._versions.newest,
        )

    def _rows_of(self, group_id: int, seq: int) -> list[int]:
        """Rows of a group that may be trained; none, and a finding, when it may not."""
        group = self._groups.groups.get(group_id)
        if group is None:
            self._check(
                False, "conservation", seq, "group {} taken, but it was trained, dropped or never dispatched", group_id
            )
            return []
        rows: list[int] = []
        for trajectory in group.members.values():
            self._check(
                bool(trajectory.rows),
                "whole_groups",
                seq,
                "group {} taken without its trajectory {}, of which no row is stored",
                group_id,
                trajectory.id,
            )
            self._check(
                trajectory.stages.issuperset(group.phase.stages),
                "stages",
                seq,
                "trajectory {} taken before it went through the stages {}",
                trajectory.id,
                [stage for stage in group.phase.stages if stage not in trajectory.stages],
            )
            if group.phase.rollout:
                self._check_answer(trajectory, seq)
            rows += trajectory.rows
        return rows

    def _check_answer(self, trajectory: Trajectory, seq: int) -> None:
        self._check(
            trajectory.finished and trajectory.finish_reason in WHOLE_ANSWERS and trajectory.scored,
            "scored",
            seq,
            "trajectory {} taken with finish reason {!r}, judged: {}",
            trajectory.id,
            trajectory.finish_reason if trajectory.finished else "unfinished",
            trajectory.scored,
        )

    # ------------------------------------------------------------ trained, or not

    def batch_released(self, event: BatchReleased) -> None:
        """Exactly what was taken; its groups stay as they are until they are dropped."""
        self._check_same(event, "released")
        self.taken = None
        self.released += 1

    def resumed(self, event: Resumed) -> None:
        """A state is saved between two batches."""
        self._check(self.taken is None, "resume", event.seq, "the run goes on from a state with a batch taken")
        self.taken = None

    def _check_same(self, event: BatchTrained | BatchReleased, what: str) -> None:
        taken = self.taken
        same = taken is not None and (
            event.version == taken.version
            and sorted(event.groups) == sorted(taken.groups)
            and sorted(event.rows) == sorted(taken.rows)
        )
        self._check(
            same,
            "batch",
            event.seq,
            "the batch {} at version {} is not the one taken{}",
            what,
            event.version,
            f" at version {taken.version}" if taken else ", none was",
        )

    def batch_trained(self, event: BatchTrained) -> None:
        """Exactly what was taken; applied, it makes the next version."""
        self._check_same(event, "trained")
        self._check_rewards(event)
        self.taken = None
        self._end_rows(event)
        self.optimizer_steps += event.optimizer_steps
        if event.applied:
            self.trained += 1
            self._versions.current = event.version + 1
        else:
            self.skipped += 1

    def _check_rewards(self, event: BatchTrained) -> None:
        """Rewards reach the log by way of the controller, and the trainer with the rows: two ways, one number."""
        whole = self._check(
            len(event.rewards) == len(event.rows),
            "rewards",
            event.seq,
            "the trainer read {} rewards with {} rows",
            len(event.rewards),
            len(event.rows),
        )
        if not whole:
            return
        books = self._groups
        for row, read in zip(event.rows, event.rewards, strict=True):
            if trajectory := books.live.get(books.rows.get(row, -1)):
                self._check(
                    _as_stored(trajectory.reward) == read,
                    "rewards",
                    event.seq,
                    "row {} was scored {}, the trainer read {}",
                    row,
                    trajectory.reward,
                    read,
                )

    def _end_rows(self, event: BatchTrained) -> None:
        books = self._groups
        ended: dict[int, Trajectory] = {}
        for row in event.rows:
            id = books.rows.get(row, -1)
            trajectory = books.live.get(id)
            fate = "never stored" if id < 0 else books.fates.get(id, "")
            fresh = self._check(
                trajectory is not None, "conservation", event.seq, "row {} trained, but it was {}", row, fate
            )
            if fresh and trajectory is not None:
                self.unscored += id not in ended and trajectory.scored and trajectory.reward is None
                ended[id] = trajectory
                if event.applied:
                    self._check_staleness(row, event, trajectory)
            elif fate != DROPPED and event.applied:
                books.trained += 1  # as the event claims; the law no longer adds up
        if event.applied:
            books.trained += len(ended)
        else:
            books.dropped[SKIPPED_REASON] += len(ended)
        for trajectory in ended.values():
            books.end(trajectory, TRAINED if event.applied else SKIPPED)

    def _check_staleness(self, row: int, event: BatchTrained, trajectory: Trajectory) -> None:
        staleness = event.version - trajectory.oldest
        phase = trajectory.group.phase
        self.staleness[phase.phase][staleness] += 1
        self.mixed += len({version for version, _, _ in trajectory.spans}) > 1
        self._check(
            0 <= staleness <= phase.max_staleness,
            "staleness",
            event.seq,
            "row {} of version {} trained at version {}: staleness {}, max_staleness {}",
            row,
            trajectory.oldest,
            event.version,
            staleness,
            phase.max_staleness,
        )


def _as_stored(reward: float | None) -> float | None:
    """As a row's float32 is written to the log, where what is not finite is null."""
    stored = math.nan if reward is None else ctypes.c_float(reward).value
    return stored if math.isfinite(stored) else None
