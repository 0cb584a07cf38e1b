"""``multi_version``: several policy versions in flight, each trajectory pinned to one, staleness bounded by waiting.

Nothing is cut off or discarded to keep the bound: what is too old to wait is trained first, and the oldest version in
flight is waited for (the sliding window of DORA, arXiv 2604.26256, with the gates that paper leaves open:
:mod:`headrace_staleness.deadlines`).

Where ``legacy_filling`` lets a group start under an older version, ``may_fill`` keeps all the lines of those gates; and
it feeds no version that the window waits for next, which would only be held up longer.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from headrace.contract import FlowView
from headrace.errors import StalenessError
from headrace_staleness.deadlines import Deadlines, Waits


class MultiVersion(Deadlines):
    """``K + 1`` versions are live at most when retired ones are freed at once."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``max_staleness``: K ≥ 0. ``outstanding_batches``: how many batches' worth of groups may be dispatched and
        not taken, 1 … max(K, 1). Default: 2, or 1 where K ≤ 1; more than 2 only raises the mean staleness.
        ``waits``: what the oldest version in flight holds up.
        ``legacy_filling``: slots that idle on instances of older versions get new groups of those, staler ones on
        purpose; only for K ≥ 3."""

        max_staleness: int
        outstanding_batches: float | None = None
        waits: Waits = "publication"
        legacy_filling: bool = False

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings,
            max_staleness=settings.max_staleness,
            outstanding_batches=settings.outstanding_batches,
            waits=settings.waits,
        )

    def check(self, *, batch_groups: int) -> None:
        super().check(batch_groups=batch_groups)
        if self.settings.legacy_filling and self.max_staleness < 3:
            raise StalenessError(
                f"legacy_filling with max_staleness = {self.max_staleness} < 3: publication, or the next batch, waits "
                f"for every version older than the newest, so that none may be filled",
                fix="leave legacy_filling out, or set max_staleness = 3 or more",
            )

    def may_fill(self, view: FlowView, version: int) -> bool:
        """The window does not wait for it, and all that is outstanding can still be trained in time."""
        if not self.settings.legacy_filling or self.is_due(version, view):
            return False
        outstanding = Counter(view.in_flight) + Counter(view.ready) + Counter([version])
        return self.is_in_time(outstanding, view, batches=int(not view.batch_taken))
