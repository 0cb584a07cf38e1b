"""``windowed``: a producer gate on whole iterations (Relax, arXiv 2604.11554), each trajectory pinned to one version.

An iteration is a batch's worth of groups, in the order of their dispatch. With B = ``batch_groups``,
S = ``max_staleness`` and t = the newest version, batch t is the oldest iteration that is not yet trained and published:

    a group of iteration n may start    ⟺    nothing is left to train  or  n − t ≤ S
                                        ⟺    outstanding < B · (S + 1)    before batch t is taken
                                             outstanding < B · S          once it is

Batches are trained in the order of dispatch: none is taken while an older version than its newest is in flight.

No row can be late: when a group starts under version v, B · (S + 1) groups at most are outstanding with it, counting
those of batch v; batches v … v + S hold them, oldest first. Publication therefore waits for nothing. What is guaranteed
is the version of each row, not of an iteration: a batch that was skipped leaves the version as it was, and later
iterations are only fresher for it. Nothing can get stuck: with nothing in flight the oldest B groups may be taken, or
there are fewer and another may start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.contract import FlowView, StalenessPolicy
from headrace.errors import StalenessError


class Windowed(StalenessPolicy):
    """At most S + 1 iterations coexist, the one in training included: B · (S + 1) groups are held."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``max_staleness``: S ≥ 0; 0 is the synchronous run."""

        max_staleness: int

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self.max_staleness = settings.max_staleness

    def check(self, *, batch_groups: int) -> None:
        if self.max_staleness < 0:
            raise StalenessError(
                f"max_staleness = {self.max_staleness} < 0: iteration n starts while n - (oldest iteration left) <= "
                f"max_staleness, and 0 - 0 <= {self.max_staleness} never holds",
                fix="set max_staleness = 0 for the synchronous run, or more",
            )

    def admit(self, view: FlowView) -> int:
        """What is left of the iterations within the window."""
        iterations = self.max_staleness + (not view.batch_taken)
        return max(0, iterations * view.batch_groups - view.outstanding)

    def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
        """Nothing older than the chosen is still in flight."""
        return all(version >= max(chosen) for version in view.in_flight)

    def may_publish(self, view: FlowView) -> bool:
        """Always: the gate is where groups start."""
        return True
