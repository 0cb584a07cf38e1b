"""One optimiser update from accumulated sums: scale, check, clip, step.

Invariant: an update whose loss or gradient is not finite changes nothing, not even the schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_torch.trainer.optimizers import Optimizer
from headrace_torch.trainer.parameters import Parameters
from headrace_torch.trainer.schedule import Schedule


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What an update did."""

    applied: bool
    gradient_norm: float
    """Before clipping."""
    learning_rate: float


class Updater:
    """Everything that an optimiser step reads and writes; ``steps`` counts those applied."""

    def __init__(
        self,
        *,
        parameters: Parameters,
        optimizer: Optimizer,
        schedule: Schedule,
        learning_rate: float,
        max_gradient_norm: float,
    ) -> None:
        self.parameters = parameters
        self.optimizer = optimizer
        self.steps = 0
        self._schedule = schedule
        self._learning_rate = learning_rate
        self._max_gradient_norm = max_gradient_norm

    def update(self, *, loss: float, denominator: float) -> Update:
        """Scale the accumulated gradients by 1 / ``denominator`` (> 0), and step if ``loss`` and they are finite."""
        gradients = self.parameters.gradients()
        torch._foreach_mul_(gradients, 1.0 / denominator)
        norm = self.norm(gradients)
        share = self._schedule.share(self.steps)
        applied = math.isfinite(loss) and math.isfinite(norm)
        if applied:
            if norm > self._max_gradient_norm:
                torch._foreach_mul_(gradients, self._max_gradient_norm / norm)
            self.optimizer.step(share=share)
            self.parameters.refresh()
            self.steps += 1
        self.parameters.clear()
        return Update(applied=applied, gradient_norm=norm, learning_rate=self._learning_rate * share)

    def skip(self) -> Update:
        """An update without trainable tokens."""
        self.parameters.clear()
        rate = self._learning_rate * self._schedule.share(self.steps)
        return Update(applied=False, gradient_norm=0.0, learning_rate=rate)

    def norm(self, tensors: list[Tensor]) -> float:
        """Euclidean norm over all tensors."""
        return float(torch.linalg.vector_norm(torch.stack(torch._foreach_norm(tensors))))
