"""Group-relative advantages (GRPO, Shao et al. 2024, arXiv:2402.03300, section 4.1.1).

With the rewards r of a group's scored trajectories, mean m and sample standard deviation s (ddof 1, two
passes, float64):

    group_std:  A_i = (r_i - m) / s           none:  A_i = r_i - m     (Dr. GRPO, arXiv:2503.20783)

Invariant: a group whose rewards are equal gets exactly 0, and no finite reward gives a non-finite
advantage. Baselines are over trajectories: rows of one trajectory share one advantage and count once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.contract import Array
from headrace_algorithms.rows import Groups

Scaling = Literal["group_std", "none"]

EQUAL_TOLERANCE = 1e-6
"""Rewards are equal when max - min <= EQUAL_TOLERANCE * max(1, largest |reward| of the group)."""
STD_FLOOR = 1e-4
"""A standard deviation up to STD_FLOOR * largest |reward| of the group is noise, and must not be scaled up to 1:
the difference to the mean is then left unscaled, unless scaling makes it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStatistics:
    """Per group ([g], over scored trajectories) and per row ([n]) results."""

    advantages: Array
    """float64 [n]: 0 for unscored rows, rows of equal groups and lone survivors."""
    scored: Array
    """bool [n]: the reward is finite."""
    survivors: Array
    """int64 [g]: scored trajectories."""
    mean: Array
    """float64 [g]: 0 without survivors."""
    low: Array
    """float64 [g]: +inf without survivors."""
    high: Array
    """float64 [g]: -inf without survivors."""
    equal: Array
    """bool [g]: fewer than two survivors, or equal rewards."""


def group_relative(rewards: Array, groups: Groups, *, first: Array, scaling: Scaling) -> GroupStatistics:
    """Advantages of every row. ``rewards``: float [n], not finite when unscored. ``first``: bool [n], one row
    per trajectory; only those enter the statistics."""
    rewards = rewards.astype(np.float64)
    scored = np.isfinite(rewards)
    chosen = groups.order[(scored & first)[groups.order]]
    member, values = groups.index[chosen], rewards[chosen]

    survivors = np.bincount(member, minlength=groups.count)
    mean = np.bincount(member, weights=values, minlength=groups.count) / np.maximum(survivors, 1)
    squares = np.bincount(member, weights=(values - mean[member]) ** 2, minlength=groups.count)
    std = np.sqrt(squares / np.maximum(survivors - 1, 1))
    low, high = np.full(groups.count, np.inf), np.full(groups.count, -np.inf)
    np.minimum.at(low, member, values)
    np.maximum.at(high, member, values)

    some = survivors > 0
    magnitude = np.maximum(np.abs(np.where(some, low, 0.0)), np.abs(np.where(some, high, 0.0)))
    spread = np.subtract(high, low, out=np.zeros(groups.count), where=some)
    equal = (survivors < 2) | (spread <= EQUAL_TOLERANCE * np.maximum(magnitude, 1.0))
    scale = np.ones(groups.count)
    if scaling == "group_std":
        scale = np.where(std > STD_FLOOR * magnitude, std, np.maximum(std, 1.0))

    informative = scored & ~equal[groups.index]
    index = groups.index[informative]
    advantages = np.zeros(len(rewards))
    advantages[informative] = (rewards[informative] - mean[index]) / scale[index]
    return GroupStatistics(
        advantages=advantages, scored=scored, survivors=survivors, mean=mean, low=low, high=high, equal=equal
    )
