"""One scale for a whole batch: advantages over their standard deviation, their mean taken off or not.

With the advantages A of a batch's N trainable tokens, their mean m and sample standard deviation s (ddof 1, two passes,
float64):

    whitening         value          source
    scale             A / s          ratios of advantages stay what they were: nothing is taken off and added back
    shift_and_scale   (A - m) / s    REINFORCE++, arXiv:2501.03262; usual for PPO

Every token counts once, and only trainable ones do. Fewer than two have no deviation and stay as they are; where all
are equal there is nothing to scale, and ``shift_and_scale`` makes 0 of them. Invariant: sums are exact before they are
rounded, so that no order of values changes a bit.
"""

from __future__ import annotations

import math
from typing import Literal

import numpy as np

from headrace.contract import Array
from headrace_algorithms.advantages import EQUAL_TOLERANCE, STD_FLOOR

Whitening = Literal["none", "scale", "shift_and_scale"]


def whitened(advantages: Array, tokens: Array, *, whitening: Whitening) -> Array:
    """float64 [n]. ``advantages``: float64 [n], each that of ``tokens`` (int64 [n]) trainable tokens; those of none are
    never read, and come out as 0."""
    chosen = tokens > 0
    values, counts = advantages[chosen].astype(np.float64), tokens[chosen].astype(np.float64)
    found = np.zeros(len(advantages))
    found[chosen] = values if whitening == "none" or counts.sum() < 2 else _whitened(values, counts, whitening)
    return found


def _whitened(values: Array, counts: Array, whitening: Whitening) -> Array:
    total = counts.sum()
    mean = math.fsum(counts * values) / total
    magnitude = float(np.abs(values).max())
    equal = np.ptp(values) <= EQUAL_TOLERANCE * max(magnitude, 1.0)
    std = 0.0 if equal else math.sqrt(math.fsum(counts * (values - mean) ** 2) / (total - 1))
    unit = std if std > STD_FLOOR * magnitude else max(std, 1.0)
    if whitening == "scale":
        return values / unit
    return np.zeros(len(values)) if equal else (values - mean) / unit
