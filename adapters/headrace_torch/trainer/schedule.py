"""Learning-rate schedules. Invariant: the rate is a pure function of the number of optimiser steps taken so far."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

ScheduleName = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Linear warm-up to the full rate, then constant, linear or cosine decay to ``final_share`` of it."""

    name: ScheduleName
    warmup_steps: int
    total_steps: int
    """Steps after which the final share is reached (and kept)."""
    final_share: float

    def share(self, step: int) -> float:
        """Share of the full rate for the step after ``step`` applied ones; warm-up is (step + 1) / warmup_steps."""
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps
        if self.name == "constant":
            return 1.0
        progress = min(1.0, (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps))
        remaining = 1.0 - progress if self.name == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
        return self.final_share + (1.0 - self.final_share) * remaining
