"""What ``grpo`` can be told, and which combinations mean something.

Invariant: a setting that could not act in the chosen combination is refused here, before anything starts.
Torch-free, so that a job file is checked without the trainer's libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from headrace_algorithms.advantages import Scaling
from headrace_algorithms.aggregation import Aggregation

Loss = Literal["clipped", "decoupled", "importance"]
Level = Literal["token", "sequence_product", "sequence_geometric"]
Outside = Literal["clamp", "reject"]
Estimator = Literal["k1", "k2", "k3"]

_ON_POLICY = "0 <= importance_floor <= 1 <= importance_cap, so that a token sampled on-policy keeps its weight of 1"


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

    importance_cap: float = 2.0
    """Upper bound of the ratio to the behaviour policy; ``inf``: none. ``decoupled`` and ``importance``: of the weight.
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
        ("clip_high", settings.clip_high, 0 <= settings.clip_high < math.inf, "0 <= clip_high < inf"),
        ("importance_floor", settings.importance_floor, 0 <= settings.importance_floor <= 1, _ON_POLICY),
        ("importance_cap", cap, cap >= 1, _ON_POLICY),
        (
            "kl_coefficient",
            settings.kl_coefficient,
            0 <= settings.kl_coefficient < math.inf,
            "0 <= kl_coefficient < inf",
        ),
    )
    for name, value, holds, rule in rules:
        if not holds:
            raise ValueError(f"{name} = {value} is out of bounds; expected {rule}")


def _combinations(settings: GrpoSettings) -> None:
    length, cap = settings.constant_length, settings.importance_cap
    if settings.aggregation == "constant" and (length is None or not 0 < length < math.inf):
        raise ValueError(
            f"aggregation 'constant' needs a positive constant_length, got {length}; "
            "the rollout's max_new_tokens is a usual choice"
        )
    if settings.aggregation != "constant" and length is not None:
        raise ValueError(
            f"constant_length = {length} does nothing under aggregation {settings.aggregation!r}; "
            "remove it, or set aggregation = 'constant'"
        )
    if settings.loss == "clipped":
        _clipped(settings)
    if settings.importance_outside == "reject" and cap == math.inf and settings.importance_floor == 0:
        raise ValueError(
            "importance_outside = 'reject' has no bound to reject by; set importance_cap or importance_floor"
        )
    if settings.kl_coefficient > 0 and settings.kl_estimator == "k1" and not settings.kl_importance:
        raise ValueError(
            "kl_estimator 'k1' without importance weights has an expected gradient of zero; "
            "set kl_importance = true, or use k2 or k3"
        )


def _clipped(settings: GrpoSettings) -> None:
    weighting = (settings.importance_floor, settings.importance_level, settings.importance_outside)
    if weighting != (0.0, "token", "clamp"):
        raise ValueError(
            "loss 'clipped' has no importance weight for importance_floor, importance_level or importance_outside "
            "to act on; remove them, or set loss = 'decoupled' or 'importance'"
        )
    cap, end = settings.importance_cap, 1 + settings.clip_high
    if cap < end:
        raise ValueError(
            f"importance_cap = {cap} lies inside the clip range; under loss 'clipped' it must be at least "
            f"1 + clip_high = {end:g}"
        )
