"""The ``training_engine`` role: forward passes, optimiser steps, weights, exact save and load.

Methods block and are called from one thread, which is never the event loop's.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from headrace.contract.columns import Batch, Ragged
from headrace.contract.loss import LossSpec
from headrace.contract.metrics import Metric
from headrace.contract.model import ModelFacts
from headrace.contract.plugin import Plugin
from headrace.contract.quantization import LowBit, Quantization
from headrace.contract.weights import WeightSource

CURRENT = "current"
"""The weights being trained, as opposed to a named snapshot."""

ForwardOutput = Literal["logprobs", "entropy", "values"]
SaveKind = Literal["resume", "export"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingCapabilities:
    """What an engine with given settings can do; read before anything starts."""

    snapshots: bool = False
    """It is :class:`Snapshots`."""
    scratch: bool = False
    """It is :class:`ScratchModels`."""
    values: bool = False
    """It can keep a critic: the output ``values``, and ``LossInputs.values``."""
    dtype: str = "float32"
    low_bit: tuple[LowBit, ...] = ()
    """Kinds of low-bit weights that it can compute with while it trains others."""
    adapter: bool = False
    """It trains an adapter: its weight source has a base (:mod:`headrace.contract.adapters`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """What core tells an engine at start."""

    name: str
    model_path: str
    """A Hugging Face-format directory."""
    seed: int
    threads: int
    total_steps: int
    """Optimiser steps this phase will take, for the learning-rate schedule."""
    values: bool = False
    """Keep a critic beside the policy, whose values are 0 before any training. It is in ``resume`` saves and in
    snapshots, and in no published weights and no export."""
    quantization: Quantization | None = None
    """Set: every forward pass, of snapshots too, computes with what this scheme makes of the weights, by the arithmetic
    of its format; the gradient goes straight through to the weights themselves; and the weight source gives, of what
    the scheme covers, the very parts that are computed with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one optimiser step did."""

    applied: bool
    """False: loss or gradient was not finite, and weights, optimiser and schedule are unchanged."""
    loss: float
    gradient_norm: float
    """Before clipping."""
    learning_rate: float
    metrics: Mapping[str, Metric]


class TrainingStep(ABC):
    """One optimiser step in progress: sums accumulate as micro-batches arrive and are scaled once."""

    @abstractmethod
    def accumulate(self, batch: Batch) -> None:
        """Add a micro-batch's numerator sum and its gradient. A batch without trainable tokens adds nothing."""

    @abstractmethod
    def finish(self, *, denominator: float) -> StepResult:
        """Divide by ``denominator`` (of the whole step), clip, step. A denominator of 0 is a step without
        trainable tokens: loss 0, zero gradient, nothing applied. With another denominator and nothing accumulated the
        step is applied with a zero gradient, so that leaving out rows that cannot contribute equals computing them."""

    @abstractmethod
    def discard(self) -> None:
        """Forget the accumulated sums."""


class TrainingEngine(Plugin, ABC):
    """States: constructed → ``start`` → usable → ``close`` (any time, twice is fine)."""

    @classmethod
    def capabilities(cls, settings: Any) -> TrainingCapabilities:
        """Answered without importing the engine."""
        return TrainingCapabilities()

    @abstractmethod
    def start(self, context: TrainingContext) -> None:
        """Load the model. EngineError when it cannot."""

    @abstractmethod
    def forward(
        self,
        batch: Batch,
        *,
        outputs: tuple[ForwardOutput, ...] = ("logprobs",),
        weights: str = CURRENT,
        temperature: float = 1.0,
    ) -> Mapping[str, Ragged]:
        """Per-token outputs (float32, aligned with ``tokens``, 0 where ``loss_mask`` is False) without
        gradient. ``weights``: CURRENT or a snapshot's name. Needs columns ``tokens`` and ``loss_mask``."""

    @abstractmethod
    def begin_step(self, loss: LossSpec) -> TrainingStep:
        """Begin an optimiser step with this loss. One step at a time."""

    @abstractmethod
    def weight_source(self) -> WeightSource:
        """The current weights."""

    @abstractmethod
    def save(self, path: str, *, kind: SaveKind) -> None:
        """``resume``: all that training needs to go on bit for bit, snapshots included. ``export``: a Hugging Face
        directory, tokenizer files included. ``path`` is a directory, created when missing."""

    @abstractmethod
    def load(self, path: str) -> None:
        """Restore a ``resume`` save, whole or not at all. RunError when a part is missing or of another model."""

    @abstractmethod
    def close(self) -> None:
        """Free everything."""


class Snapshots(ABC):
    """Capability: frozen copies of the weights, for reference and proximal policies."""

    @abstractmethod
    def snapshot(self, name: str) -> None:
        """Freeze the current weights under ``name``, replacing what had that name."""

    @abstractmethod
    def drop_snapshot(self, name: str) -> None:
        """Free a snapshot; an unknown one is ignored."""


class ScratchModels(ABC):
    """Capability: create a randomly initialised model directory, tokenizer included."""

    @classmethod
    def check_model(cls, settings: Mapping[str, Any], *, origin: Callable[[str], str]) -> ModelFacts | None:
        """Raise what :meth:`create_model` would raise for these settings, without importing the engine; else what the
        model will be like, None when that cannot be told. ``origin(key)``: where that setting was written."""
        return None

    @classmethod
    @abstractmethod
    def create_model(cls, path: str, *, settings: Mapping[str, Any], seed: int) -> None:
        """Write a Hugging Face directory to ``path``; OSError when the disk refuses it. ``settings``: the job file's
        ``[model.scratch]`` table. ConfigError names a setting that is unknown or impossible."""
