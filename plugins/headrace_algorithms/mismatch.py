"""How far the trainer's log-probs lie from those the tokens were sampled with. Always reported.

With d_t = log trainer(t) - log behaviour(t): in the first step of an on-policy batch any d but rounding is a
fault (kernels, precision, temperature, alignment); later it also holds the policy's own movement. Small steady
gaps multiply over a sequence, which is what ``sequence_ratio_max`` shows, and what is said of sequences by their
length.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.contract import Reduction
from headrace_algorithms.corrections import LOG_LIMIT, bounded_exp, sequence_sums

Metrics = dict[str, tuple[Any, Any, Reduction]]

TAIL = 0.5
"""Nats from which on a token counts as of the tail: its ratio is beyond what any clip lets through."""
IMPROBABLE, PROBABLE = -6.0, -3.0
"""Log-probs of an error token: at most the first for the trainer, at least the second for who sampled it."""
LENGTHS = (1, 16, 128, 1024)
"""The least tokens of the sequences that are told of together."""


def mismatch_metrics(log_ratio: Tensor, behaviour: Tensor, sequence: Tensor, sequences: int) -> Metrics:
    """Metrics of d (``log_ratio``: [T], T > 0, without gradient) and of log behaviour ([T]).

    ``abs_logprob_diff_mean|max``: |d| over tokens; ``tail_share``: of tokens with |d| > ``TAIL``. ``k3``: mean of
    e^d - 1 - d, which estimates KL(behaviour || trainer). ``ratio_max``: largest e^d. ``sequence_ratio_max``: largest
    exp(sum of d over a sequence). ``effective_sample_share``: (sum w)^2 / (T sum w^2) with w = e^d, taken within the
    micro-batch and averaged over tokens. ``error_token_share``: of tokens that were sampled as probable and that the
    trainer finds improbable (QaRL, arXiv:2604.07853). ``abs_logprob_diff_mean_from_N``, ``sequence_log_ratio_from_N``:
    over sequences of N tokens and more, up to the next of ``LENGTHS``, mean |d|, and mean |sum of d|.
    """
    tokens = log_ratio.shape[0]
    distance = log_ratio.abs()
    bounded = log_ratio.clamp(-LOG_LIMIT, LOG_LIMIT)
    ratio = bounded.exp()
    total = ratio.sum()
    sums = sequence_sums(log_ratio, sequence, sequences)
    error = (behaviour >= PROBABLE) & (behaviour + log_ratio <= IMPROBABLE)
    return {
        "mismatch/abs_logprob_diff_mean": (distance.sum(), tokens, "mean"),
        "mismatch/abs_logprob_diff_max": (distance.amax(), 1, "max"),
        "mismatch/tail_share": ((distance > TAIL).sum(), tokens, "mean"),
        "mismatch/error_token_share": (error.sum(), tokens, "mean"),
        "mismatch/k3": ((torch.expm1(bounded) - bounded).sum(), tokens, "mean"),
        "mismatch/ratio_max": (ratio.amax(), 1, "max"),
        "mismatch/sequence_ratio_max": (bounded_exp(sums[sequence].amax()), 1, "max"),
        "mismatch/effective_sample_share": (total.square() / ratio.square().sum(), tokens, "mean"),
        **_by_length(distance, sums, sequence, sequences),
    }


def _by_length(distance: Tensor, sums: Tensor, sequence: Tensor, sequences: int) -> Metrics:
    """``sums``: [S], of d over each sequence."""
    lengths = sequence_sums(torch.ones_like(distance), sequence, sequences)
    own = sequence_sums(distance, sequence, sequences)
    bins = torch.bucketize(lengths, torch.tensor(LENGTHS, device=lengths.device), right=True)
    metrics: Metrics = {}
    for number in sorted(set(bins.tolist())):
        if number:  # 0: sequences without tokens
            among = bins == number
            least, tokens = LENGTHS[number - 1], int(lengths[among].sum())
            metrics[f"mismatch/abs_logprob_diff_mean_from_{least}"] = (own[among].sum(), tokens, "mean")
            metrics[f"mismatch/sequence_log_ratio_from_{least}"] = (sums[among].abs().sum(), int(among.sum()), "mean")
    return metrics
