"""How an algorithm's loss meets a training engine, without core knowing a tensor library.

A loss is a function named ``module:function`` that the trainer's process imports. It is called per
micro-batch, possibly inside a pipeline schedule, and returns a numerator *sum*: the engine divides once,
by the denominator of the whole optimiser step, so the result cannot depend on the split.

    def my_loss(inputs: LossInputs, **settings) -> LossOutput: ...
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.contract.metrics import Reduction


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSpec:
    """Which loss to call and what to give it."""

    function: str
    """``module:function``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    columns: tuple[str, ...] = ()
    """Columns it reads beyond the ones every loss gets; an absent one is a ContractError."""
    temperature: float = 1.0
    """Sampling temperature; the engine's log-probs are of the distribution tempered alike."""
    entropy: bool = False
    """Whether ``LossInputs.entropy`` is computed."""
    values: bool = False
    """Whether ``LossInputs.values`` is computed; the engine was started with ``TrainingContext.values`` then."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossInputs:
    """One micro-batch, trainable tokens only (T of them, in S sequences); tensors of the engine's library.
    Tokens outside ``loss_mask`` never reach a loss, so nothing in them can."""

    logprobs: Any
    """float32 [T], with gradient."""
    weights: Any
    """float32 [T]: the ``loss_weights`` column."""
    sequence: Any
    """int64 [T]: index of each token's sequence, 0 to S - 1, non-decreasing."""
    sequences: int
    """S; a sequence may have no trainable token."""
    columns: Mapping[str, Any]
    """The columns of ``LossSpec.columns``: [T] for token-aligned ones, [S] for dense ones."""
    entropy: Any = None
    """float32 [T], with gradient, or None."""
    values: Any = None
    """float32 [T], with gradient, or None: the critic's, before each token."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LossOutput:
    """``numerator``: scalar with gradient, a sum of ``weights * per-token loss`` (or its sequence-level like).
    ``metrics``: name → (total, count, reduction), numbers or scalar tensors without gradient."""

    numerator: Any
    metrics: Mapping[str, tuple[Any, Any, Reduction]] = field(default_factory=dict)
