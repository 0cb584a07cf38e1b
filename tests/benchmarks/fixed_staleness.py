"""A staleness policy for measurements: every batch is as stale as the bound allows, whatever the machine's speed.

Free-running rollout is only as stale as it is ahead of the trainer, which on a small machine is far from the bound.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.contract import FlowView
from headrace_staleness.multi_version import MultiVersion


class FixedStaleness(MultiVersion):
    """``multi_version`` that neither takes a batch nor publishes before ``outstanding_batches`` are outstanding.

    With max(K, 1) of them, the groups of version t start behind K - 1 batches and are taken at t + K. Invariant, from
    batch K on and while no group is dropped: all rows of version t's batch are of version t - K.
    """

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        return self.admit(view) == 0 and super().may_take(view, chosen)

    def may_publish(self, view: FlowView) -> bool:
        return self.admit(view) == 0 and super().may_publish(view)
