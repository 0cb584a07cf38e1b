"""The embedded training engine: exact packed training of small and medium decoder models in one process.

This module is torch-free: the engine's parts live in :mod:`headrace_torch.trainer` and are imported by ``start``.
Invariant: gradients and losses do not depend on how a step is split into micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Protocol

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
from headrace_torch.training_settings import LoraSettings, TorchTrainingSettings

__all__ = ["LoraSettings", "TorchTrainingEngine", "TorchTrainingSettings"]


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
            adapter=settings.lora is not None,
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
