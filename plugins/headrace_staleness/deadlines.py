"""The gates that ``multi_version`` and ``partial_rollout`` share: every group has a last batch that may hold it, and
earliest deadline first must stay feasible.

With B = ``batch_groups``, K = ``max_staleness``, t = the newest version: a group of version v must be in one of the
batches up to v + K. So of the outstanding groups, those of version ≤ t − K + d are due within batches t … t + d.
The policy keeps, for every d = 0 … K,

    outstanding of version ≤ t − K + d   ≤   B · d         once batch t is taken
                                         ≤   B · (d + 1)   before

Taking a batch is gated on the first line: what is due in it has finished. Publishing t + 1 turns the first line into
the second. New groups of version t count for d = K alone: ``admit`` keeps that case.

What waits for the oldest version in flight is the publication of the version that follows, or only the batch that is
the last to hold it. A trajectory that starts right after its version was published has the time of K batches where
publication waits. Where only batches wait it has that of K + 1, less the training of the last; then slots need not idle
for the sake of K, for the price of K + 1 versions in flight instead of K.

A group that starts when only the publication is missing has one batch fewer than the next one, under a version that is
about to follow: where long trajectories are what batches wait for, a step then lasts longest / K, and longest / (K + 1)
where groups start after publications. So where only batches wait, no group starts between a batch and the publication
that follows it, if that is near and slots are not what is scarce:

    the batch's last part ≤ B / 4        it is trained as it comes, and what is left of it is trained soon
    outstanding ≥ B                      the next batch is there or under way
    of that ready ≥ B / 4                this batch waited for old groups while newer ones finished

No row can be late, since for d = 0 nothing of version ≤ t − K is left once batch t is taken. Nothing can get stuck:
with nothing in flight, before batch t, the second line says that the oldest B groups may be taken, and when there are
fewer than B another group is admitted; after it, t + 1 may be published.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, TypeAlias

from headrace.contract import FlowView, StalenessPolicy
from headrace.errors import StalenessError

Waits: TypeAlias = Literal["publication", "batch"]
MOST = 1000
"""Versions; the policy looks at each of them."""
_FEW = 4
"""Of a batch's groups one in so many are few."""


class Deadlines(StalenessPolicy):
    """At most ``max(K, 1)`` versions have groups in flight, ``K + 1`` where publication does not wait.
    ``outstanding_batches``: how many batches' worth of groups may be dispatched and not taken; None: 2, or 1 where
    K ≤ 1. ``waits``: what the oldest version in flight holds up."""

    def __init__(
        self, settings: object, *, max_staleness: int, outstanding_batches: float | None, waits: Waits
    ) -> None:
        super().__init__(settings)
        self.waits = waits
        self.max_staleness = max_staleness
        most = max(max_staleness, 1)
        self._outstanding_batches = min(most, 2) if outstanding_batches is None else outstanding_batches

    def check(self, *, batch_groups: int) -> None:
        most, outstanding = max(self.max_staleness, 1), self._outstanding_batches
        if self.max_staleness < 0:
            raise StalenessError(
                f"max_staleness = {self.max_staleness} < 0: no row is newer than the policy that trains on it",
                fix="set max_staleness = 0 for the synchronous run, or more",
            )
        if self.max_staleness > MOST:
            raise StalenessError(
                f"max_staleness = {self.max_staleness} > {MOST}: rows of so old a policy teach nothing",
                fix="set max_staleness to a few versions, such as 2",
            )
        if not outstanding >= 1:
            raise StalenessError(
                f"outstanding_batches = {outstanding:g} < 1: {outstanding * batch_groups:g} outstanding groups "
                f"never fill a batch of {batch_groups}",
                fix="set outstanding_batches to at least 1, or leave it out",
            )
        if outstanding > most:
            raise StalenessError(
                f"outstanding_batches · groups = {outstanding:g} · {batch_groups} = {outstanding * batch_groups:g} > "
                f"max(max_staleness, 1) · groups = {most} · {batch_groups} = {most * batch_groups}: once a batch is "
                f"taken, only {self.max_staleness} more may hold the newest groups, so the rest would have to wait or "
                f"be trained too late",
                fix=f"set outstanding_batches to at most {most}, or raise max_staleness",
            )

    def admit(self, view: FlowView) -> int:
        """As many as the batches that remain for them can hold, within ``outstanding_batches``; those that the next
        batch lacks, where others had better start after the publication that follows this one."""
        remaining = self.max_staleness + (not view.batch_taken)
        limit = min(round(self._outstanding_batches * view.batch_groups), remaining * view.batch_groups)
        if self.waits == "batch" and view.batch_taken and self._gains_a_batch(view):
            limit = min(limit, view.batch_groups)
        return max(0, limit - view.outstanding)

    def _gains_a_batch(self, view: FlowView) -> bool:
        """Whether a group had better wait for the publication that follows a batch that was taken."""
        return view.last_part * _FEW <= view.batch_groups <= sum(view.ready.values()) * _FEW

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        """The chosen are within the bound, and what stays behind can still be trained in time."""
        oldest = view.version - self.max_staleness
        left = {
            version: view.in_flight.get(version, 0) + view.ready.get(version, 0) - chosen.get(version, 0)
            for version in {*view.in_flight, *view.ready}
        }
        return min(chosen) >= oldest and self.is_in_time(left, view, batches=0)

    def is_in_time(self, outstanding: Mapping[int, int], view: FlowView, *, batches: int) -> bool:
        """Whether all of it can be trained in time. ``batches``: how many can hold what is due at once."""
        oldest = view.version - self.max_staleness
        return all(
            sum(count for version, count in outstanding.items() if version <= oldest + later)
            <= (batches + later) * view.batch_groups
            for later in range(self.max_staleness + 1)
        )

    def may_publish(self, view: FlowView) -> bool:
        """Always, or when nothing in flight would have to be in the next version's batch: what is finished may still be
        waiting, but a batch cannot be closed over an unfinished trajectory. (K = 0: nothing in flight.)"""
        return self.waits == "batch" or not any(self.is_due(version, view) for version in view.in_flight)

    def is_due(self, version: int, view: FlowView) -> bool:
        """Whether the batch of the next version is the last that may hold it."""
        return version <= view.version + 1 - self.max_staleness
