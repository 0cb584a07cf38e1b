"""How far the trainer's log-probs lie from those the tokens were sampled with. Always reported.

With d_t = log trainer(t) - log behaviour(t): in the first step of an on-policy batch any d but rounding is a
fault (kernels, precision, temperature, alignment); later it also holds the policy's own movement. Small steady
gaps multiply over a sequence, which is what ``sequence_ratio_max`` shows.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.contract import Reduction
from headrace_algorithms.corrections import LOG_LIMIT, bounded_exp, sequence_sums

Metrics = dict[str, tuple[Any, Any, Reduction]]


def mismatch_metrics(log_ratio: Tensor, sequence: Tensor, sequences: int) -> Metrics:
    """Metrics of d (``log_ratio``: [T], T > 0, without gradient).

    ``abs_logprob_diff_mean|max``: |d| over tokens. ``k3``: mean of e^d - 1 - d, which estimates KL(behaviour ||
    trainer). ``ratio_max``: largest e^d. ``sequence_ratio_max``: largest exp(sum of d over a sequence).
    ``effective_sample_share``: (sum w)^2 / (T sum w^2) with w = e^d, taken within the micro-batch and averaged
    over tokens.
    """
    tokens = log_ratio.shape[0]
    distance = log_ratio.abs()
    bounded = log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = bounded.exp()
    total = ratio.sum()
    largest_sequence = sequence_sums(log_ratio, sequence, sequences)[sequence].amax()
    return {
        "mismatch/abs_logprob_diff_mean": (distance.sum(), tokens, "mean"),
        "mismatch/abs_logprob_diff_max": (distance.amax(), 1, "max"),
        "mismatch/k3": ((torch.expm1(bounded) - bounded).sum(), tokens, "mean"),
        "mismatch/ratio_max": (ratio.amax(), 1, "max"),
        "mismatch/sequence_ratio_max": (bounded_exp(largest_sequence), 1, "max"),
        "mismatch/effective_sample_share": (total.square() / ratio.square().sum(), tokens, "mean"),
    }
