"""``delayed_update``: rollout takes up each version one iteration late (the delayed parameter update of AsyncFlow,
arXiv 2507.01663).

An iteration is the groups of one training batch. While batch t trains, iteration t + 1 is generated under version t.
Version t + 1 is published as soon as the batch is trained and that iteration has been dispatched in full, so that
weights travel to the instances while they generate; nothing starts under it before the iteration is complete and taken
as batch t + 1. With B = ``batch_groups``, at every moment

    outstanding ≤ B        so that batch t + 1 is all of iteration t + 1, sampled from version t: staleness 1

and 0 for the first batch, before which there was no version. Every iteration has one version, save for groups that
start anew after publication, in the place of dropped ones or in a resumed run: those are of the new version.

Nothing can get stuck: before batch t is taken, B groups are outstanding or another may start, and when all are complete
they may be taken; after it, B are outstanding and version t + 1 may be published, or another may start. An iteration
that exceeds the fleet's room holds publication back until its last group has found a place.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.contract import FlowView, StalenessPolicy
from headrace.errors import StalenessError


class DelayedUpdate(StalenessPolicy):
    """One iteration is generated while the one before it is trained."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``max_staleness``: 1, by definition."""

        max_staleness: int = 1

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.max_staleness = settings.max_staleness

    def check(self, *, batch_groups: int) -> None:
        if self.max_staleness != 1:
            raise StalenessError(
                f"max_staleness = {self.max_staleness} != 1: batch t + 1 is generated under version t, while batch t "
                f"trains, so that staleness is (t + 1) - t = 1 by definition",
                fix="set max_staleness = 1; synchronous is the policy for 0, windowed and multi_version are for more",
            )

    def admit(self, view: FlowView) -> int:
        """What the one iteration lacks."""
        return max(0, view.batch_groups - view.outstanding)

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        """A whole iteration, of the version before this one or, for want of that, of this one."""
        return min(chosen) >= view.version - 1

    def may_publish(self, view: FlowView) -> bool:
        """The next iteration has been dispatched in full: none of its groups will start under the next version."""
        return view.outstanding >= view.batch_groups
