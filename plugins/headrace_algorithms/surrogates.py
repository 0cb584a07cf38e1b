"""What a policy gradient maximises: the ratio of two policies times the advantage, bounded.

With the ratio r of a token (or of its sequence) and its advantage A:

    surrogate   value                                                          source
    clip        min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)               PPO, arXiv:1707.06347
                ... and for A < 0 with min(r, dual_clip) for r                 dual clip, arXiv:1912.09729
    soft        A sigmoid(k (r - 1)) 4 / k, k by the sign of A                 SAPO, arXiv:2511.20347

``clip``: outside the bounds there is no gradient. ``soft``: the gradient at r = 1 is A, and falls off on both sides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from headrace_algorithms.corrections import bounded_exp, sequence_means
from headrace_algorithms.loss_settings import LossSettings, RatioLevel
from headrace_algorithms.mismatch import Metrics


def policy_ratio(log_ratio: Tensor, sequence: Tensor, sequences: int, *, level: RatioLevel) -> Tensor:
    """r of each token, [T], with gradient. ``log_ratio``: log current - log anchor, [T]. ``sequence``: the geometric
    mean over the tokens of each sequence, for all of them (GSPO, arXiv:2507.18071, equation 7)."""
    if level == "sequence":
        log_ratio = sequence_means(log_ratio, sequence, sequences)[sequence]
    return bounded_exp(log_ratio)


def surrogate(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Tensor:
    """The table above, [T]."""
    if settings.surrogate == "soft":
        steepness = torch.where(advantages > 0, settings.soft_positive, settings.soft_negative)
        return advantages * torch.sigmoid(steepness * (ratio - 1)) * 4 / steepness
    # The clip bounds positive advantages already: only negative ones are ever beyond dual_clip.
    ratio = torch.where(advantages < 0, ratio.clamp(max=settings.dual_clip), ratio)
    clipped = ratio.clamp(1 - settings.clip_low, 1 + settings.clip_high)
    return torch.minimum(ratio * advantages, clipped * advantages)


def bound_metrics(ratio: Tensor, advantages: Tensor, settings: LossSettings) -> Metrics:
    """``policy/clip_share_low|high|dual``: share of tokens whose gradient the clip removed at that side. ``ratio``:
    without gradient."""
    if settings.surrogate == "soft":
        return {}
    beyond = {
        "low": (advantages < 0) & (ratio < 1 - settings.clip_low),
        "high": (advantages > 0) & (ratio > 1 + settings.clip_high),
    }
    if settings.dual_clip < math.inf:
        beyond["dual"] = (advantages < 0) & (ratio > settings.dual_clip)
    return {f"policy/clip_share_{side}": (tokens.sum(), ratio.shape[0], "mean") for side, tokens in beyond.items()}
