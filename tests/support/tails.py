"""Lengths of trajectories, in tokens."""

from __future__ import annotations

from random import Random


def heavy_tailed(random: Random) -> int:
    """One in six is twenty times as long as the shortest."""
    return 40 if random.random() < 1 / 6 else random.randint(2, 8)
