"""Where a rank is: Megatron's groups of ranks, and what of the model and of a batch is this one's.

Invariant: Megatron's groups are those of this engine alone; leaving ends them.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace_megatron.engine import model_parallel_cuda_manual_seed, parallel_state
from headrace_megatron.settings import MegatronTrainingSettings
from headrace_torch.ranks.group import join, leave


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Of one rank. Ranks count by tensor, then data, then pipeline."""

    rank: int
    settings: MegatronTrainingSettings

    @property
    def tensor_rank(self) -> int:
        """Which part of every matrix."""
        return self.rank % self.settings.tensor_parallel

    @property
    def expert_rank(self) -> int:
        """Which of the experts."""
        return self.rank // self.settings.tensor_parallel % self.settings.expert_parallel

    @property
    def stage(self) -> int:
        """Of the pipeline."""
        return self.rank // (self.settings.tensor_parallel * self.settings.data_parallel)

    @property
    def first(self) -> bool:
        """Has the embedding."""
        return self.stage == 0

    @property
    def last(self) -> bool:
        """Has the head, and computes losses."""
        return self.stage == self.settings.pipeline_parallel - 1

    @property
    def speaks(self) -> bool:
        """Tells what came of its share of the rows, which the other ranks of the share know or have a part in."""
        return self.last and self.tensor_rank == 0


def enter(rendezvous: str, layout: Layout) -> None:
    """Meet the other ranks, and make Megatron's groups. EngineError when this process is in such a group already."""
    settings = layout.settings
    join(
        rendezvous,
        rank=layout.rank,
        ranks=settings.ranks,
        device=settings.device,
        seconds=settings.rank_deadline,
    )
    parallel_state.initialize_model_parallel(
        settings.tensor_parallel,
        settings.pipeline_parallel,
        expert_model_parallel_size=settings.expert_parallel,
        expert_tensor_parallel_size=1 if settings.expert_parallel > 1 else None,
        distributed_timeout_minutes=max(1, round(settings.rank_deadline / 60)),
        create_gloo_process_groups=True,
    )
    model_parallel_cuda_manual_seed(1)  # nothing is drawn; layers ask for a generator nevertheless


def depart() -> None:
    """Of groups that lost a rank too."""
    parallel_state.destroy_model_parallel()
    leave()
