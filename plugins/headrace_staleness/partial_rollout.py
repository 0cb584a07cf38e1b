"""``partial_rollout``: interruptible generation. When a version is published, what an instance has in the middle of its
answers goes on under it.

No instance is held back by a long answer, and one version at a time is enough for it. The price is consistency within
trajectories (C1 of DORA, arXiv 2604.26256): a row may have tokens of several versions, each with the log-prob of the
one that sampled it, and the keys and values of its beginning are computed again or out of date.

Staleness is counted from a row's oldest token, so that the gates on groups, batches and publication are those of
``multi_version``, with the same guarantee (:mod:`headrace_staleness.deadlines`): a group is as old as the version it
started under, and interruption makes it no younger.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.contract import Interruption
from headrace_staleness.deadlines import Deadlines, Waits


class PartialRollout(Deadlines):
    """What is in flight goes on under the newest version that its instance has."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``max_staleness``: K ≥ 0; 0 is the synchronous run. ``outstanding_batches``: how many batches' worth of
        groups may be dispatched and not taken, 1 … max(K, 1). Default: 2, or 1 where K ≤ 1. ``waits``: what the oldest
        group in flight holds up. ``keep_kv``: keys and values of an interrupted answer stay as they are; else they are
        computed again. ``mask_older``: of a row only tokens of its newest version are trained."""

        max_staleness: int
        outstanding_batches: float | None = None
        waits: Waits = "publication"
        keep_kv: bool = False
        mask_older: bool = False

    settings: Settings

    def __init__(self, settings: Settings) -> None:
        super().__init__(
            settings,
            max_staleness=settings.max_staleness,
            outstanding_batches=settings.outstanding_batches,
            waits=settings.waits,
        )

    @property
    def interruption(self) -> Interruption | None:
        if self.max_staleness == 0:  # nothing is in flight when a version is published
            return None
        return Interruption(keep_kv=self.settings.keep_kv, mask_older=self.settings.mask_older)
