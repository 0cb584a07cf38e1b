"""The embedded training engine: exact packed training of small and medium decoder models in one process.

This module is torch-free: the engine's parts live in :mod:`headrace_torch.trainer` and are imported by ``start``.
Invariant: gradients and losses do not depend on how a step is split into micro-batches.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from headrace.contract.columns import Batch, Ragged
from headrace.contract.loss import LossSpec
from headrace.contract.model import ModelFacts
from headrace.contract.training import (
    CURRENT,
    ForwardOutput,
    SaveKind,
    ScratchModels,
    Snapshots,
    TrainingCapabilities,
    TrainingContext,
    TrainingEngine,
    TrainingStep,
)
from headrace.contract.weights import WeightSource
from headrace_torch.device import check_device


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchTrainingSettings:
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


class Started(Protocol):
    """What an engine is between ``start`` and ``close``; methods are the contract's."""

    def forward(
        self, batch: Batch, *, outputs: tuple[ForwardOutput, ...], weights: str, temperature: float
    ) -> Mapping[str, Ragged]:
        """See the contract."""

    def begin_step(self, loss: LossSpec) -> TrainingStep:
        """See the contract."""

    def weight_source(self) -> WeightSource:
        """See the contract."""

    def snapshot(self, name: str) -> None:
        """See :class:`Snapshots`."""

    def drop_snapshot(self, name: str) -> None:
        """See :class:`Snapshots`."""

    def save(self, path: str, *, kind: SaveKind) -> None:
        """See the contract."""

    def load(self, path: str) -> None:
        """See the contract."""

    def close(self) -> None:
        """Free everything."""


class TorchTrainingEngine(TrainingEngine, Snapshots, ScratchModels):
    """See the contracts; this class only keeps the state machine and hands over."""

    Settings: ClassVar[type[Any]] = TorchTrainingSettings

    def __init__(self, settings: TorchTrainingSettings) -> None:
        super().__init__(settings)
        self._trainer: Started | None = None

    @classmethod
    def capabilities(cls, settings: Any) -> TrainingCapabilities:
        """Snapshots, scratch models and critics with any settings."""
        return TrainingCapabilities(
            snapshots=True,
            scratch=True,
            values=True,
            dtype=settings.dtype,
            low_bit=("int8", "int4", "float8_e4m3fn"),
        )

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        """The device must be there."""
        check_device(settings.device, origin=origin("device"))

    @classmethod
    def check_model(cls, settings: Mapping[str, Any], *, origin: Callable[[str], str]) -> ModelFacts:
        """See :class:`ScratchModels` and :mod:`headrace_torch.scratch_settings`."""
        from headrace_torch.scratch_settings import read

        table = read(settings, origin=origin)
        characters = frozenset(table.alphabet)
        return ModelFacts(origin=origin("alphabet"), max_length=table.max_length, characters=characters, begins=1)

    @classmethod
    def create_model(cls, path: str, *, settings: Mapping[str, Any], seed: int) -> None:
        """See :class:`ScratchModels` and :mod:`headrace_torch.scratch`."""
        from headrace_torch.scratch import create_model

        create_model(path, settings=settings, seed=seed)

    def start(self, context: TrainingContext) -> None:
        """Load the model. EngineError when it cannot; ValueError when started already."""
        if self._trainer is not None:
            raise ValueError(f"{context.name} is started already")
        self._trainer = self._start(context)

    def _start(self, context: TrainingContext) -> Started:
        from headrace_torch.trainer.core import Trainer

        return Trainer(self.settings, context)

    def forward(
        self,
        batch: Batch,
        *,
        outputs: tuple[ForwardOutput, ...] = ("logprobs",),
        weights: str = CURRENT,
        temperature: float = 1.0,
    ) -> Mapping[str, Ragged]:
        """See the contract. ConfigError when ``temperature`` is not above 0, ValueError for an unknown snapshot."""
        return self._started.forward(batch, outputs=outputs, weights=weights, temperature=temperature)

    def begin_step(self, loss: LossSpec) -> TrainingStep:
        """See the contract. ConfigError when the loss's temperature is not above 0, ContractError when the loss cannot
        be imported, ValueError while another step is open."""
        return self._started.begin_step(loss)

    def weight_source(self) -> WeightSource:
        """See the contract; in the dtype of the settings, or low-bit."""
        return self._started.weight_source()

    def snapshot(self, name: str) -> None:
        """See :class:`Snapshots`. A ``resume`` save holds the snapshots too."""
        self._started.snapshot(name)

    def drop_snapshot(self, name: str) -> None:
        """See :class:`Snapshots`."""
        self._started.drop_snapshot(name)

    def save(self, path: str, *, kind: SaveKind) -> None:
        """See the contract. RunError when ``path`` holds something else than an earlier save."""
        self._started.save(path, kind=kind)

    def load(self, path: str) -> None:
        """See the contract."""
        self._started.load(path)

    def close(self) -> None:
        """See the contract."""
        trainer, self._trainer = self._trainer, None
        if trainer is not None:
            trainer.close()

    @property
    def _started(self) -> Started:
        if self._trainer is None:
            raise ValueError("the training engine is not started, or closed")
        return self._trainer
