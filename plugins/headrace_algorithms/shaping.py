"""Rewards as the advantages see them: the task's, less what an over-long answer costs.

    L <= length - buffer: 0        in between: (length - buffer - L) / buffer        L > length: -1

(soft over-long punishment, DAPO, arXiv:2503.14476, section 3.4). L counts the tokens that the policy generated in a
trajectory, never what an environment inserted.
"""

from __future__ import annotations

import numpy as np

from headrace.contract import Array, Batch
from headrace_algorithms.rows import sampled_tokens, trajectories_of


def overlong_penalty(generated: Array, *, length: int, buffer: int) -> Array:
    """float64 [n], from -1 to 0, of answers with ``generated`` (int64 [n]) tokens."""
    if buffer == 0:
        return np.where(generated > length, -1.0, 0.0)
    return np.clip((length - buffer - generated) / buffer, -1.0, 0.0)


def generated_tokens(batch: Batch) -> Array:
    """int64 [n]: the tokens that the policy generated in each row's whole trajectory."""
    index, count = trajectories_of(batch)
    return np.bincount(index, weights=sampled_tokens(batch), minlength=count)[index].astype(np.int64)
