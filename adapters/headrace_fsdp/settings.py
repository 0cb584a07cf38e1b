"""The keys of the trainer's table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace_torch.training_settings import CommonTrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class FsdpTrainingSettings(CommonTrainingSettings):
    """How to train, and on how many ranks. With ``device = "cuda"`` every rank has a GPU of its own."""

    ranks: int = 1
    """Processes that share the model, its optimiser and every micro-batch; each has the trainer's ``threads``."""
    activation_checkpointing: bool = False
    """Keep only each layer's input for the backward pass, which then computes the layer again."""
    cpu_offload: bool = False
    """Keep the ranks' parts of parameters, gradients and optimiser in the CPU's memory, with ``device = "cuda"``."""
    rank_deadline: float = 600.0
    """Seconds that one rank waits for another before the engine ends."""

    @property
    def shares(self) -> tuple[int, ...]:
        """Of a batch's rows: each rank has its own."""
        return tuple(range(self.ranks))

    def __post_init__(self) -> None:
        CommonTrainingSettings.__post_init__(self)  # not super(): a class with slots is made anew
        if self.ranks < 1:
            raise ValueError(f"ranks must be at least 1, got {self.ranks}")
        if not 0 < self.rank_deadline < math.inf:
            raise ValueError(f"rank_deadline must be above 0 and finite, got {self.rank_deadline}")
        if self.cpu_offload and self.device != "cuda":
            raise ValueError('cpu_offload needs device = "cuda"; on "cpu" everything is in its memory already')
