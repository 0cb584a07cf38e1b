"""How per-token losses become one number: loss weights and denominators, both local to a group.

The loss of an optimiser step is  sum over tokens (weight * loss) / sum over rows (denominator).  Because the
denominator is one sum over the whole step, neither micro-batches, nor ranks, nor padding can change it. With
L_i trainable tokens in row i, and T_g in the rows of its group:

    aggregation                 token weight   row's denominator   the mean it makes
    token_mean                  1              L_i                 over tokens (DAPO, arXiv:2503.14476)
    sequence_mean_token_mean    1 / L_i        1                   over sequences of token means (GRPO)
    sequence_mean_token_sum     1              1                   over sequences of token sums
    constant                    1              constant_length     sums over a fixed length (Dr. GRPO)
    prompt_mean                 1 / T_g        L_i / T_g           over prompts of their token means

A row counts as a sequence. Invariant: a row without trainable tokens adds nothing, in any aggregation, so
numerator and denominator always describe the same rows; and the denominator of ``constant`` never depends on
a tensor's width. A step that cuts a group apart under ``prompt_mean`` weighs each part by its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.contract import Array
from headrace_algorithms.rows import Groups

Aggregation = Literal["token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "constant", "prompt_mean"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Normalisers:
    """``weights``: float64 [n], of each trainable token of a row. ``denominators``: float64 [n]."""

    weights: Array
    denominators: Array


def normalisers(
    tokens: Array, groups: Groups, *, aggregation: Aggregation, constant_length: float | None = None
) -> Normalisers:
    """Weights and denominators of rows with ``tokens`` (int64 [n]) trainable tokens. ValueError when
    ``constant`` comes without its ``constant_length``."""
    present = (tokens > 0).astype(np.float64)
    counts = np.maximum(tokens, 1).astype(np.float64)
    if aggregation == "token_mean":
        return Normalisers(weights=present, denominators=tokens.astype(np.float64))
    if aggregation == "sequence_mean_token_mean":
        return Normalisers(weights=present / counts, denominators=present)
    if aggregation == "sequence_mean_token_sum":
        return Normalisers(weights=present, denominators=present)
    if aggregation == "prompt_mean":
        totals = np.bincount(groups.index, weights=tokens, minlength=groups.count)[groups.index]
        share = 1.0 / np.maximum(totals, 1.0)
        return Normalisers(weights=present * share, denominators=tokens * share)
    if constant_length is None:
        raise ValueError("aggregation 'constant' needs a constant_length")
    return Normalisers(weights=present, denominators=present * constant_length)
