"""What the policy loss can be told, and which combinations mean something; formulae in ``headrace_algorithms.losses``.

Invariant: a setting that could not act in the chosen combination is refused here, before anything starts.
Torch-free, so that a job file is checked without the trainer's libraries.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

Loss = Literal["clipped", "decoupled", "importance"]
Surrogate = Literal["clip", "soft"]
RatioLevel = Literal["token", "sequence"]
Level = Literal["token", "sequence_product", "sequence_geometric"]
Estimator = Literal["k1", "k2", "k3"]

_ON_POLICY = "0 <= importance_floor <= 1 <= importance_cap, so that a token sampled on-policy keeps its weight of 1"
_KEPT = "0 <= keep_floor <= 1 <= keep_cap, so that a token sampled on-policy is kept"


@dataclass(frozen=True, slots=True, kw_only=True)
class LossSettings:
    """Settings of ``policy_loss``."""

    loss: Loss = "decoupled"
    """Which policy stands where. ``clipped``: ratio current / behaviour. ``decoupled``: ratio current / proximal,
    weighted by proximal / behaviour. ``importance``: no clip, weighted by current / behaviour."""
    ratio_level: RatioLevel = "token"
    """The ratio of each token, or the geometric mean over its sequence for all of them (``sequence``, GSPO)."""
    surrogate: Surrogate = "clip"
    """How the ratio is bounded (``clipped`` and ``decoupled``). ``clip``: no gradient beyond a bound. ``soft``: less
    the further it is from 1 (SAPO)."""
    clip_low: float = 0.2
    """The ratio is clipped at 1 - clip_low (surrogate ``clip``)."""
    clip_high: float = 0.28
    """The ratio is clipped at 1 + clip_high (surrogate ``clip``)."""
    dual_clip: float = math.inf
    """Upper bound of the ratio for negative advantages, which the clip leaves without one; ``inf``: none."""
    soft_positive: float = 1.0
    """Steepness of surrogate ``soft`` for advantages above 0."""
    soft_negative: float = 1.05
    """Steepness of surrogate ``soft`` for the others: steeper, because they raise the odds of every other token."""

    importance_cap: float = 2.0
    """Upper bound of the weight; ``inf``: none (``decoupled`` and ``importance``)."""
    importance_floor: float = 0.0
    """Lower bound of the weight (``decoupled`` and ``importance``)."""
    importance_level: Level = "token"
    """What a weight is taken over: each token; the product over its sequence; the geometric mean over it."""
    keep_cap: float = math.inf
    """Tokens with a ratio to the behaviour policy above it leave the numerator and stay in the denominator; ``inf``:
    none does (``decoupled`` and ``importance``)."""
    keep_floor: float = 0.0
    """So do those with a ratio below it."""
    keep_level: Level = "token"
    """What that ratio is taken over, as ``importance_level``: over a sequence, its tokens stay or go together."""

    kl_coefficient: float = 0.0
    """Weight of the KL to the reference policy in the loss."""
    kl_estimator: Estimator = "k3"
    """See ``headrace_algorithms.kl``."""
    kl_importance: bool = True
    """Weight the KL of each token by current / behaviour, so that its expected gradient is that of the reverse KL
    whichever policy sampled the token."""
    entropy_coefficient: float = 0.0
    """Weight of the entropy bonus: the loss falls by it times the entropy of each token's distribution."""

    def __post_init__(self) -> None:
        _bounds(self)
        _combinations(self)


def _bounds(settings: LossSettings) -> None:
    s = settings
    rules = (
        ("clip_low", s.clip_low, 0 <= s.clip_low < 1, "0 <= clip_low < 1"),
        ("clip_high", s.clip_high, 0 <= s.clip_high < math.inf, "0 <= clip_high < inf"),
        ("dual_clip", s.dual_clip, s.dual_clip >= 1, "dual_clip >= 1"),
        ("soft_positive", s.soft_positive, 0 < s.soft_positive < math.inf, "0 < soft_positive < inf"),
        ("soft_negative", s.soft_negative, 0 < s.soft_negative < math.inf, "0 < soft_negative < inf"),
        ("importance_floor", s.importance_floor, 0 <= s.importance_floor <= 1, _ON_POLICY),
        ("importance_cap", s.importance_cap, s.importance_cap >= 1, _ON_POLICY),
        ("keep_floor", s.keep_floor, 0 <= s.keep_floor <= 1, _KEPT),
        ("keep_cap", s.keep_cap, s.keep_cap >= 1, _KEPT),
        ("kl_coefficient", s.kl_coefficient, 0 <= s.kl_coefficient < math.inf, "0 <= kl_coefficient < inf"),
        (
            "entropy_coefficient",
            s.entropy_coefficient,
            0 <= s.entropy_coefficient < math.inf,
            "0 <= entropy_coefficient < inf",
        ),
    )
    for name, value, holds, rule in rules:
        if not holds:
            raise ValueError(f"{name} = {value} is out of bounds; expected {rule}")


def _combinations(settings: LossSettings) -> None:
    if settings.loss == "clipped":
        _refuse_weighting(settings)
    if settings.loss == "importance":
        _refuse_bounds_of_a_ratio(settings)
    if settings.surrogate == "soft" and settings.dual_clip != math.inf:
        raise ValueError("dual_clip is a bound of surrogate 'clip'; 'soft' has none: remove it")
    if settings.ratio_level == "sequence" and settings.loss == "clipped" and settings.dual_clip != math.inf:
        raise ValueError(
            "dual_clip is not defined for the sequence ratio to the behaviour policy (GSPO); "
            "set loss = 'decoupled', which makes it TBPO's, or remove it"
        )
    if settings.keep_level != "token" and settings.keep_cap == math.inf and not settings.keep_floor:
        raise ValueError(
            f"keep_level {settings.keep_level!r} has no bound to leave tokens out by; set keep_cap or keep_floor"
        )
    if settings.kl_coefficient > 0 and settings.kl_estimator == "k1" and not settings.kl_importance:
        raise ValueError(
            "kl_estimator 'k1' without importance weights has an expected gradient of zero; "
            "set kl_importance = true, or use k2 or k3"
        )


def _refuse_weighting(settings: LossSettings) -> None:
    s = settings
    weighting = (s.importance_floor, s.importance_level, s.keep_floor, s.keep_cap, s.keep_level)
    if weighting != (0.0, "token", 0.0, math.inf, "token"):
        raise ValueError(
            "loss 'clipped' has no importance weight for importance_floor, importance_level, keep_floor, keep_cap or "
            "keep_level to act on; remove them, or set loss = 'decoupled' or 'importance'"
        )


def _refuse_bounds_of_a_ratio(settings: LossSettings) -> None:
    if (settings.ratio_level, settings.surrogate, settings.dual_clip) != ("token", "clip", math.inf):
        raise ValueError(
            "loss 'importance' has a ratio of 1 for ratio_level, surrogate or dual_clip to act on; "
            "remove them, or set loss = 'clipped' or 'decoupled'"
        )
