"""The keys of a trainer's table: those of every training engine on this floor, and those of the ``torch`` one."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

LoraTarget = Literal["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CommonTrainingSettings:
    """How to train."""

    dtype: Literal["float32", "bfloat16"] = "float32"
    """Of computation and of the weights that engines get; master weights and optimiser are always float32."""
    device: Literal["cpu", "cuda"] = "cpu"
    optimizer: Literal["adamw", "muon"] = "adamw"
    """``muon``: Muon for the layers' matrices, AdamW for embedding, norms and head."""
    learning_rate: float = 2e-4
    adamw_learning_rate: float = 2e-3
    """Of what ``optimizer = "muon"`` leaves to AdamW."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Of AdamW."""
    eps: float = 1e-8
    """Of AdamW."""
    weight_decay: float = 0.0
    """Decoupled, on matrices."""
    max_gradient_norm: float = 1.0
    """Gradients are clipped to it; ``inf``: never."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    warmup_steps: int = 0
    """Optimiser steps of linear warm-up."""
    final_learning_rate_share: float = 0.0
    """Share of the rate left at the phase's last step, under ``linear`` and ``cosine``."""

    def __post_init__(self) -> None:
        for name in ("learning_rate", "adamw_learning_rate", "eps"):
            if not 0 < getattr(self, name) < math.inf:
                raise ValueError(f"{name} must be above 0 and finite, got {getattr(self, name)}")
        if not self.max_gradient_norm > 0:
            raise ValueError(f"max_gradient_norm must be above 0, got {self.max_gradient_norm}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas must be at least 0 and below 1, got {self.betas}")
        if not 0 <= self.weight_decay < math.inf:
            raise ValueError(f"weight_decay must be at least 0, got {self.weight_decay}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps must be at least 0, got {self.warmup_steps}")
        if not 0 <= self.final_learning_rate_share <= 1:
            raise ValueError(f"final_learning_rate_share must be 0 to 1, got {self.final_learning_rate_share}")


@dataclass(frozen=True, slots=True, kw_only=True)
class LoraSettings:
    """An adapter (LoRA, Hu et al. 2021): W + (alpha / rank) B A in the place of a weight W, of which A and B alone are
    trained. B is 0 at the start, so that the first version is the model as it was."""

    rank: int = 16
    """Rows of A and columns of B."""
    alpha: float = 32.0
    targets: tuple[LoraTarget, ...] = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    """Linear layers that get one, in every layer of the model."""

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise ValueError(f"lora.rank must be at least 1, got {self.rank}")
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"lora.alpha must be above 0 and finite, got {self.alpha}")
        if not self.targets or len(set(self.targets)) < len(self.targets):
            raise ValueError(f"lora.targets must name some layers, each once, got {list(self.targets)}")

    @property
    def scale(self) -> float:
        """By which B A is multiplied."""
        return self.alpha / self.rank


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrainingSettings(CommonTrainingSettings):
    """How to train, and what."""

    lora: LoraSettings | None = None
    """Train an adapter and leave the model's weights as they are; a critic is trained beside it. None: train all."""

    def __post_init__(self) -> None:
        CommonTrainingSettings.__post_init__(self)  # not super(): a class with slots is made anew
        if self.lora is not None and self.optimizer == "muon":
            raise ValueError(
                'optimizer must be "adamw" with lora: muon makes the singular values of an update equal, which of two '
                "factors says nothing about their product"
            )
