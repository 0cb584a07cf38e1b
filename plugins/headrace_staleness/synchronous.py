"""``synchronous``: a version's batch is generated, trained and published before anything of the next version starts.

Invariant: every row is trained at the version that generated it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.contract import FlowView, StalenessPolicy
from headrace.errors import StalenessError


class Synchronous(StalenessPolicy):
    """The reference that every other policy at ``max_staleness = 0`` must equal."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``max_staleness`` may be left out."""

        max_staleness: int = 0

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.max_staleness = settings.max_staleness

    def check(self, *, batch_groups: int) -> None:
        if self.max_staleness != 0:
            raise StalenessError(
                f"max_staleness = {self.max_staleness}, and under the synchronous policy it is 0 by definition",
                fix='leave max_staleness out, or set policy = "multi_version"',
            )

    def admit(self, view: FlowView) -> int:
        """The batch's groups, once per version."""
        return 0 if view.batch_taken else max(0, view.batch_groups - view.outstanding)

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        """All of it is of this version."""
        return chosen == {view.version: view.batch_groups}

    def may_publish(self, view: FlowView) -> bool:
        """Nothing is left behind."""
        return view.outstanding == 0
