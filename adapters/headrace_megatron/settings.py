"""The keys of the trainer's table."""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace_torch.training_settings import CommonTrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronTrainingSettings(CommonTrainingSettings):
    """How to train, and on which ranks: ``tensor_parallel`` x ``data_parallel`` x ``pipeline_parallel`` processes, each
    with the trainer's ``threads``. With ``device = "cuda"`` every rank has a GPU of its own."""

    tensor_parallel: int = 1
    """Ranks that share every matrix."""
    pipeline_parallel: int = 1
    """Stages; each has as many layers."""
    data_parallel: int = 1
    """Copies of the model; each computes some rows of a micro-batch and keeps a part of the optimiser's state."""
    expert_parallel: int = 1
    """Of the copies, those that share the experts of a mixture."""
    rank_deadline: float = 600.0
    """Seconds that one rank waits for another before the engine ends."""

    def __post_init__(self) -> None:
        CommonTrainingSettings.__post_init__(self)  # not super(): a class with slots is made anew
        for name in ("tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.data_parallel % self.expert_parallel:
            raise ValueError(
                f"expert_parallel must divide data_parallel, whose ranks share the experts; "
                f"{self.expert_parallel} does not divide {self.data_parallel}"
            )
        if self.expert_parallel > 1 and self.tensor_parallel > 1:
            raise ValueError("expert_parallel goes with tensor_parallel = 1 in this engine")
        if self.optimizer != "adamw":
            raise ValueError(
                f'optimizer must be "adamw", got {self.optimizer!r}: Megatron\'s distributed optimizer cuts matrices '
                'across, and muon needs them whole; engines "torch" and "fsdp" have it'
            )
        if not 0 < self.rank_deadline < math.inf:
            raise ValueError(f"rank_deadline must be above 0 and finite, got {self.rank_deadline}")

    @property
    def ranks(self) -> int:
        """Processes."""
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel

    @property
    def shares(self) -> tuple[int, ...]:
        """Of a batch's rows, rank by rank; Megatron numbers ranks by tensor, then data, then pipeline."""
        return tuple(rank // self.tensor_parallel % self.data_parallel for rank in range(self.ranks))
