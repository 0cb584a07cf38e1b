"""A staleness policy to be read in a minute: a batch or two outstanding, and publication waits for the oldest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.contract import FlowView, Interruption, StalenessPolicy
from headrace.errors import StalenessError


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeStalenessSettings:
    """``max_staleness`` 0 or 1: with more, publication would have to know ages. ``interrupts``: trajectories go on
    under newer versions."""

    max_staleness: int = 1
    interrupts: bool = False


class FakeStaleness(StalenessPolicy):
    """Of the groups of one version, one batch is trained at once and at most one more in the next batch; a version is
    published when nothing is in flight that the next batch may not hold."""

    Settings = FakeStalenessSettings

    def __init__(self, settings: FakeStalenessSettings) -> None:
        super().__init__(settings)
        self.max_staleness = settings.max_staleness
        self._interrupts = settings.interrupts

    @property
    def interruption(self) -> Interruption | None:
        return Interruption() if self._interrupts else None

    def check(self, *, batch_groups: int) -> None:
        if self.max_staleness not in (0, 1):
            raise StalenessError(
                f"max_staleness = {self.max_staleness}, and this policy knows 0 and 1", fix="set it to 0 or 1"
            )

    def admit(self, view: FlowView) -> int:
        batches = self.max_staleness if view.batch_taken else 1
        return max(0, batches * view.batch_groups - view.outstanding)

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        return min(chosen) >= view.version - self.max_staleness

    def may_publish(self, view: FlowView) -> bool:
        oldest = view.version + 1 - self.max_staleness
        return all(version >= oldest for version in (*view.in_flight, *view.ready))
