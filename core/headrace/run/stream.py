"""Which task a group gets: the order of an environment's stream, resumable by position alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from headrace.run.seeds import derive_seed

_EPOCHS = 2
"""Whose orders are kept: near the end of one, groups of both are asked for in turn."""


def task_order(size: int | None, *, seed: int) -> Callable[[int], int]:
    """Position → task index. An endless stream is taken in order; a finite one is shuffled anew every epoch, each
    task once per epoch."""
    if size is None:
        return lambda position: position
    shuffled: dict[int, np.ndarray] = {}

    def index(position: int) -> int:
        epoch, offset = divmod(position, size)
        if epoch not in shuffled:
            while len(shuffled) >= _EPOCHS:
                shuffled.pop(min(shuffled))
            shuffled[epoch] = np.random.default_rng(derive_seed(seed, "epoch", epoch)).permutation(size)
        return int(shuffled[epoch][offset])

    return index
