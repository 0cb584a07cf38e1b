"""Group-relative advantages: the distance of a reward to the mean of its group, in some unit.

With the rewards r of a group's n scored trajectories, their mean m and sample standard deviation s (ddof 1, two
passes, float64), A_i = (r_i - m) / unit:

    scaling         unit           source
    group_std       s              GRPO, arXiv:2402.03300, section 4.1.1
    none            1              Dr. GRPO, arXiv:2503.20783
    leave_one_out   (n - 1) / n    RLOO, arXiv:2402.14740: r_i less the mean of the others
    group_mean      m              MaxRL, arXiv:2602.02710; rewards of 0 and more

Without the group's mean as the baseline (``none``) A_i is r_i: what it is compared with is then a matter of the whole
batch (``whitening``). With ``greedy`` A_i = r_i - g, where g is the reward of the greedy answer to the same prompt
(ReMax, arXiv:2310.10505, algorithm 1); without g there is nothing to compare with, and the group counts as unscored.

Invariant: compared with its own mean or with g, a group whose rewards are equal (to g) gets exactly 0, and no finite
reward gives a non-finite advantage. Baselines are over trajectories: rows of one trajectory share one advantage and
count once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from headrace.contract import Array
from headrace.errors import ContractError
from headrace_algorithms.rows import Groups

Baseline = Literal["group_mean", "none", "greedy"]
Scaling = Literal["group_std", "none", "leave_one_out", "group_mean"]

EQUAL_TOLERANCE = 1e-6
"""Rewards are equal when max - min <= EQUAL_TOLERANCE * max(1, largest |reward| of the group)."""
STD_FLOOR = 1e-4
"""A standard deviation up to STD_FLOOR * largest |reward| of the group is noise, and must not be scaled up to 1:
the difference to the mean is then left unscaled, unless scaling makes it smaller."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GroupStatistics:
    """Per group ([g], over scored trajectories) and per row ([n]) results."""

    advantages: Array
    """float64 [n]: 0 for unscored rows, and unless compared with nothing for rows of equal groups."""
    scored: Array
    """bool [n]: the reward is finite, and so is what it is compared with."""
    survivors: Array
    """int64 [g]: scored trajectories."""
    mean: Array
    """float64 [g]: 0 without survivors."""
    low: Array
    """float64 [g]: +inf without survivors."""
    high: Array
    """float64 [g]: -inf without survivors."""
    equal: Array
    """bool [g]: all rewards are equal, those compared with g to it; or fewer than two survivors, of which one is enough
    beside g."""


def group_relative(
    rewards: Array,
    groups: Groups,
    *,
    first: Array,
    scaling: Scaling,
    baseline: Baseline = "group_mean",
    greedy: Array | None = None,
) -> GroupStatistics:
    """Advantages of every row. ``rewards``: float [n], not finite when unscored. ``first``: bool [n], one row
    per trajectory; only those enter the statistics. ``scaling`` acts on distances to the group's mean only.
    ``greedy``: float [n], g of each row's group, for that baseline."""
    rewards = rewards.astype(np.float64)
    scored = np.isfinite(rewards) if greedy is None else np.isfinite(rewards) & np.isfinite(greedy)
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
    lowest, highest, compared = low.copy(), high.copy(), survivors
    if greedy is not None:
        np.minimum.at(lowest, member, greedy[chosen])
        np.maximum.at(highest, member, greedy[chosen])
        compared = survivors + some
    magnitude = np.maximum(np.abs(np.where(some, lowest, 0.0)), np.abs(np.where(some, highest, 0.0)))
    spread = np.subtract(highest, lowest, out=np.zeros(groups.count), where=some)
    equal = (compared < 2) | (spread <= EQUAL_TOLERANCE * np.maximum(magnitude, 1.0))
    if scaling == "group_mean" and np.any(low[some] < 0):
        raise ContractError(
            f"a reward of {low[some].min():g} cannot be scaled by the mean of its group",
            fix="advantage_scaling = 'group_mean' needs rewards of 0 and more; give such rewards, or use another one",
        )
    advantages = np.zeros(len(rewards))
    if baseline == "none":
        advantages[scored] = rewards[scored]
    elif greedy is not None:
        informative = scored & ~equal[groups.index]
        advantages[informative] = rewards[informative] - greedy[informative]
    else:
        unit = _unit(scaling, mean=mean, std=std, survivors=survivors, magnitude=magnitude)
        informative = scored & ~equal[groups.index]
        index = groups.index[informative]
        advantages[informative] = (rewards[informative] - mean[index]) / unit[index]
    return GroupStatistics(
        advantages=advantages, scored=scored, survivors=survivors, mean=mean, low=low, high=high, equal=equal
    )


def _unit(scaling: Scaling, *, mean: Array, std: Array, survivors: Array, magnitude: Array) -> Array:
    """float64 [g], positive wherever the group's rewards differ."""
    if scaling == "group_std":
        return np.where(std > STD_FLOOR * magnitude, std, np.maximum(std, 1.0))
    unit = np.ones(len(mean))
    if scaling == "leave_one_out":
        np.divide(survivors - 1, survivors, out=unit, where=survivors > 1)
    elif scaling == "group_mean":
        np.copyto(unit, mean, where=mean > 0)
    return unit
