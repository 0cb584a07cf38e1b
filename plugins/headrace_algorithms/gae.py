"""Credit for each token by a critic: generalised advantage estimation (arXiv:1506.02438, equations 11 to 16).

Over the trainable tokens t of a row, each with the reward r_t that came after it and the critic's value V_t before it:

    delta_t = r_t + discount * V_t' - V_t
    A_t     = delta_t + discount * trace_decay * A_t'        t' is the row's next trainable token
    R_t     = A_t + V_t                                      what the critic should have expected

Beyond a row's last trainable token V and A are 0: an answer that ran out of budget ends there too. What an environment
inserted between two tokens is no step: it is neither discounted nor an end. Invariant: a row's numbers depend on that
row alone.
"""

from __future__ import annotations

import numpy as np

from headrace.contract import Array

RETURNS = "returns"
"""Ragged float32, aligned with ``tokens``: R_t."""


def generalised_advantages(
    rewards: Array, values: Array, tokens: Array, *, discount: float, trace_decay: float
) -> Array:
    """A_t, float64 [N]. ``rewards``, ``values``: float64 [N], of the trainable tokens of row after row; ``tokens``:
    int64 [n], how many each row has."""
    ends = np.cumsum(tokens)
    found, carried, expected = np.zeros(len(values)), np.zeros(len(tokens)), np.zeros(len(tokens))
    for back in range(1, int(tokens.max(initial=0)) + 1):
        rows = np.flatnonzero(tokens >= back)
        at = ends[rows] - back
        delta = rewards[at] + discount * expected[rows] - values[at]
        carried[rows] = delta + discount * trace_decay * carried[rows]
        expected[rows] = values[at]
        found[at] = carried[rows]
    return found
