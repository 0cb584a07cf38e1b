"""What ``grpo`` can be told, and which combinations mean something.

Invariant: a setting that could not act in the chosen combination is refused here, before anything starts.
Torch-free, so that a job file is checked without the trainer's libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace.errors import ConfigError
from headrace_algorithms.advantages import Scaling
from headrace_algorithms.aggregation import Aggregation

Loss = Literal["clipped", "decoupled", "importance"]
Level = Literal["token", "sequence_product", "sequence_geometric"]
Outside = Literal["clamp", "reject"]
Estimator = Literal["k1", "k2", "k3"]


@dataclass(frozen=True, slots=True, kw_only=True)
class GrpoSettings:
    """Settings of ``grpo``; formulae in ``headrace_algorithms.losses``."""

    advantage_scaling: Scaling = "group_std"
    """``group_std`` or ``none``; the only scaling stage there is."""
    aggregation: Aggregation = "token_mean"
    """The mean the loss is; see ``headrace_algorithms.aggregation``."""
    constant_length: float | None = None
    """Divisor per row, in tokens, of aggregation ``constant``."""
    mask_truncated: bool = False
    """Leave rows that ran out of budget out of numerator and denominator. Their rewards stay in the baseline."""

    loss: Loss = "decoupled"
    """Which policy stands where. ``clipped``: ratio current / behaviour. ``decoupled``: ratio current / proximal,
    weighted by proximal / behaviour. ``importance``: no clip, weighted by current / behaviour."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low (``clipped`` and ``decoupled``)."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high (``clipped`` and ``decoupled``)."""

    importance_cap: float | None = 2.0
    """Upper bound of the ratio to the behaviour policy. ``decoupled`` and ``importance``: of the weight.
    ``clipped``: of the ratio itself, which only bounds tokens with a negative advantage ("dual clip")."""
    importance_floor: float = 0.0
    """Lower bound of the weight (``decoupled`` and ``importance``)."""
    importance_level: Level = "token"
    """What a weight is taken over: each token; the product over its sequence; the geometric mean over it."""
    importance_outside: Outside = "clamp"
    """Weights outside floor and cap: ``clamp`` them to the bound, or ``reject`` their tokens, which then leave the
    numerator and stay in the denominator."""

    kl_coefficient: float = 0.0
    """Weight of the KL to the reference policy in the loss."""
    kl_estimator: Estimator = "k3"
    """See ``headrace_algorithms.kl``."""
    kl_importance: bool = True
    """Weight the KL of each token by current / behaviour, so that its expected gradient is that of the reverse KL
    whichever policy sampled the token."""
    kl_on_equal_groups: bool = True
    """Whether the KL also applies to groups whose rewards are equal."""

    report_entropy: bool = True
    """Report ``policy/entropy``; costs the trainer one more pass over the logits."""

    def __post_init__(self) -> None:
        _bounds(self)
        _combinations(self)


def _bounds(settings: GrpoSettings) -> None:
    cap = settings.importance_cap
    rules = (
        ("clip_low", settings.clip_low, 0 <= settings.clip_low < 1, "0 <= clip_low < 1"),
        ("clip_high", settings.clip_high, 0 <= settings.clip_high < math.inf, "clip_high >= 0, finite"),
        ("importance_floor", settings.importance_floor, 0 <= settings.importance_floor <= 1, "0 <= floor <= 1"),
        ("importance_cap", cap, cap is None or 1 <= cap < math.inf, "importance_cap >= 1, or none"),
        ("kl_coefficient", settings.kl_coefficient, 0 <= settings.kl_coefficient < math.inf, "kl_coefficient >= 0"),
    )
    for name, value, holds, rule in rules:
        if not holds:
            raise ConfigError(
                f"{name} = {value} is out of bounds; expected {rule}",
                fix="floor <= 1 <= cap, so that a token sampled on-policy keeps its weight of 1"
                if name.startswith("importance")
                else f"choose a value with {rule}",
            )


def _combinations(settings: GrpoSettings) -> None:
    length = settings.constant_length
    if settings.aggregation == "constant":
        if length is None or not 0 < length < math.inf:
            raise ConfigError(
                f"aggregation 'constant' needs a positive constant_length, got {length}",
                fix="set constant_length, for example to the rollout's max_new_tokens",
            )
    elif length is not None:
        raise ConfigError(
            f"constant_length = {length} does nothing under aggregation {settings.aggregation!r}",
            fix="remove constant_length, or set aggregation = 'constant'",
        )
    weighting = (settings.importance_floor, settings.importance_level, settings.importance_outside)
    if settings.loss == "clipped":
        if weighting != (0.0, "token", "clamp"):
            raise ConfigError(
                "loss 'clipped' has no importance weight for importance_floor, importance_level or "
                "importance_outside to act on",
                fix="remove them, or set loss = 'decoupled' or 'importance'",
            )
        if settings.importance_cap is not None and settings.importance_cap < 1 + settings.clip_high:
            raise ConfigError(
                f"importance_cap = {settings.importance_cap} lies inside the clip range, which ends at "
                f"{1 + settings.clip_high:g}",
                fix="under loss 'clipped' the cap must be at least 1 + clip_high",
            )
    if settings.importance_outside == "reject" and settings.importance_cap is None and settings.importance_floor == 0:
        raise ConfigError(
            "importance_outside = 'reject' has no bound to reject by",
            fix="set importance_cap or importance_floor",
        )
    if settings.kl_coefficient > 0 and settings.kl_estimator == "k1" and not settings.kl_importance:
        raise ConfigError(
            "kl_estimator 'k1' without importance weights has an expected gradient of zero",
            fix="set kl_importance = true, or use k2 or k3",
        )
