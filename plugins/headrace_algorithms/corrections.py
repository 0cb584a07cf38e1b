"""Importance weights: how far the policy a loss is centred on has moved from the one that sampled.

With d_t = log centre(t) - log behaviour(t) over the T tokens of a sequence:

    token                rho_t = exp(d_t)
    sequence_product     rho_t = exp(sum over the sequence of d)       the true ratio of the sequence
    sequence_geometric   rho_t = exp(mean over the sequence of d)

Bounding rho from above is truncated importance sampling (TIS; Ionides 2008; IMPALA, arXiv:1802.01561). Leaving out
what lies outside a band is masked importance sampling (MIS): at the level of a sequence all its tokens go, so that a
response which left the learner's support teaches nothing. The two are apart, each with its own level and bounds.
Invariant: weights carry no gradient, and whether a token is kept is a mask of its own, never a weight of 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from headrace_algorithms.loss_settings import Level, LossSettings

LOG_LIMIT = 20.0
"""Log-ratios are bounded to +-LOG_LIMIT before ``exp``: no overflow, so 0 * inf never arises."""


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp with its argument bounded; the gradient is 0 beyond the bound."""
    return log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Correction:
    """Per token, [T], without gradient."""

    weight: Tensor
    """Within its bounds."""
    bounded: Tensor
    """bool: a bound made the weight what it is."""
    keep: Tensor
    """bool."""


def sequence_sums(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """[S]: sums of ``values`` ([T]) over each sequence."""
    return values.new_zeros(sequences).index_add_(0, sequence, values)


def sequence_means(values: Tensor, sequence: Tensor, sequences: int) -> Tensor:
    """[S]: means of ``values`` ([T]) over each sequence; 0 for one without tokens."""
    counts = sequence_sums(torch.ones_like(values), sequence, sequences).clamp(min=1)
    return sequence_sums(values, sequence, sequences) / counts


def importance_ratio(log_ratio: Tensor, sequence: Tensor, sequences: int, *, level: Level) -> Tensor:
    """rho per token, [T], without gradient. ``log_ratio``: d, [T]; ``sequence``: [T] indices into S."""
    log_ratio = log_ratio.detach()
    if level != "token":
        over = sequence_means if level == "sequence_geometric" else sequence_sums
        log_ratio = over(log_ratio, sequence, sequences)[sequence]
    return bounded_exp(log_ratio)


def correct(log_ratio: Tensor, sequence: Tensor, sequences: int, settings: LossSettings) -> Correction:
    """``log_ratio``: d, [T]; ``sequence``: [T] indices into S. A NaN is kept: it must reach the loss."""
    weight = importance_ratio(log_ratio, sequence, sequences, level=settings.importance_level)
    floor, cap = settings.importance_floor, settings.importance_cap
    kept = importance_ratio(log_ratio, sequence, sequences, level=settings.keep_level)
    return Correction(
        weight=weight.clamp(floor, cap),
        bounded=_outside(weight, floor, cap),
        keep=~_outside(kept, settings.keep_floor, settings.keep_cap),
    )


def _outside(ratio: Tensor, floor: float, cap: float) -> Tensor:
    beyond: Tensor = (ratio < floor) | (ratio > cap)
    return beyond
