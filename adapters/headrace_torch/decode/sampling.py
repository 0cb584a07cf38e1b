"""Drawing tokens and their log-probabilities.

Invariant: token ``t`` of a request is a function of ``(seed, t)`` and the distribution alone, and its
log-probability is that of the tempered distribution over the whole vocabulary, however it was chosen.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.contract.columns import Array

_GAMMA = np.uint64(0x9E3779B97F4A7C15)


def _mix(z: Array) -> Array:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: Array = z ^ (z >> np.uint64(31))
    return mixed


def streams(seeds: Array) -> Array:
    """uint64 [n]: where each seed's random stream starts, for uint64 ``seeds`` [n]."""
    return _mix(seeds + _GAMMA)


def uniforms(starts: Array, t: Array) -> Array:
    """float64 [n] in [0, 1): draw ``t`` (int64 [n]) of the streams at ``starts``.

    SplitMix64 (Steele, Lea & Flood 2014, figure 15) by counter, so that no state is kept between draws.
    """
    bits = _mix(starts + (t.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    draws: Array = (bits >> np.uint64(11)) * 2.0**-53
    return draws


def sample(logits: Tensor, *, u: Tensor, temperature: Tensor | None, greedy: Tensor | None) -> tuple[Tensor, Tensor]:
    """One token per row of ``logits`` (float32 [n, V]) and its log-probability: int64 [n], float32 [n].

    ``u``: float64 [n] in [0, 1). ``temperature``: float32 [n, 1], None when all are 1. ``greedy``: bool [n],
    None when no row is. A token of probability 0 is never drawn; rows that are not finite get a
    log-probability that is not finite either.
    """
    if temperature is not None:
        logits = logits / temperature
    logprobs = F.log_softmax(logits, -1)
    cdf = torch.cumsum(logprobs.exp(), -1, dtype=torch.float64)
    total = cdf[:, -1]
    # u * total may round up to total, where no entry of the cdf is larger.
    target = torch.minimum(u * total, torch.nextafter(total, total.new_zeros(())))
    tokens = torch.searchsorted(cdf, target.unsqueeze(1), right=True)
    if greedy is not None:
        tokens = torch.where(greedy.unsqueeze(1), logits.argmax(-1, keepdim=True), tokens)
    tokens = tokens.clamp_(max=logits.shape[1] - 1)
    return tokens.squeeze(1), logprobs.gather(1, tokens).squeeze(1)
