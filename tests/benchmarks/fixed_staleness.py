"""A staleness policy for measurements: every batch is as stale as the bound allows, whatever the machine's speed.

Invariant, from batch K on: all rows of version t's batch are of version t - K. Free-running rollout is only as stale
as it is ahead of the trainer, which on a small machine is far from the bound.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.contract import FlowView
from headrace_staleness.multi_version import MultiVersion


class FixedStaleness(MultiVersion):
    """``multi_version`` that keeps max(K, 1) batches outstanding, and neither takes a batch nor publishes before they
    are: the groups of version t start behind the K - 1 batches that are left then, and are taken at t + K."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``max_staleness``: K ≥ 0."""

        max_staleness: int

    def __init__(self, settings: Settings) -> None:
        outstanding = float(max(settings.max_staleness, 1))
        super().__init__(MultiVersion.Settings(max_staleness=settings.max_staleness, outstanding_batches=outstanding))
        self.settings = settings  # what the job says, not what it becomes

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        return self.admit(view) == 0 and super().may_take(view, chosen)

    def may_publish(self, view: FlowView) -> bool:
        return self.admit(view) == 0 and super().may_publish(view)
