"""``capped_rloo``: REINFORCE, each trajectory against the mean of the others of its group (arXiv:2402.14740).

    advantage of i  =  reward of i  -  mean reward of the group's others
    numerator       =  - sum over sampled tokens of  min(current / behaviour, cap) * advantage * log-prob
    denominator     =  scored trajectories of the optimiser step

The ratio has no gradient: it weighs tokens that an older version sampled. It is 1 on policy, and the cap keeps a token
that has become far more likely from outweighing all others.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.contract import (
    Algorithm,
    AlgorithmNeeds,
    Array,
    Batch,
    LossInputs,
    LossOutput,
    LossSpec,
    Metric,
    Prepared,
)
from headrace.contract.columns import BEHAVIOUR_LOGPROBS, DENOMINATOR, GROUP, LOSS_MASK, LOSS_WEIGHTS, REWARD


@dataclass(frozen=True, slots=True, kw_only=True)
class RlooSettings:
    """``cap``: what an importance ratio counts for at most, above 1."""

    cap: float = 2.0

    def __post_init__(self) -> None:
        if not self.cap > 1:
            raise ValueError(f"cap must be above 1, got {self.cap}")


class Rloo(Algorithm):
    """Rows that could not be scored are outside means, weights and denominators."""

    Settings = RlooSettings

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        return AlgorithmNeeds(min_group_size=2)

    def prepare(self, batch: Batch) -> Prepared:
        mask, reward = batch.ragged(LOSS_MASK), batch.dense(REWARD).astype(np.float64)
        scored = np.isfinite(reward)
        advantage = advantages(reward, batch.dense(GROUP), order=batch.rows)
        weights = np.repeat(advantage, mask.lengths) * mask.values
        sampled = np.array([row.any() for row in mask], dtype=bool)
        return Prepared(
            columns={
                LOSS_WEIGHTS: mask.like(weights.astype(np.float32)),
                DENOMINATOR: scored.astype(np.float64),
            },
            trained=(advantage != 0) & sampled,
            metrics={"reward/mean": Metric(total=float(reward[scored].sum()), count=float(scored.sum()))},
        )

    def loss(self, *, temperature: float) -> LossSpec:
        return LossSpec(
            function="headrace_parity.rloo:capped_policy_gradient",
            settings={"cap": self.settings.cap},
            columns=(BEHAVIOUR_LOGPROBS,),
            temperature=temperature,
        )


def advantages(reward: Array, group: Array, *, order: Array) -> Array:
    """float64 [n]: each reward less the mean of the others of its group; 0 for rows without a reward, and where all of
    a group are equal. Sums are taken in the order of ``order``, so that the order of a batch changes no bit."""
    found = np.zeros(len(reward))
    for one in np.unique(group):
        members = np.flatnonzero((group == one) & np.isfinite(reward))
        members = members[np.argsort(order[members])]
        rewards = reward[members]
        if len(members) > 1 and rewards.min() < rewards.max():
            found[members] = rewards - (rewards.sum() - rewards) / (len(members) - 1)
    return found


def capped_policy_gradient(inputs: LossInputs, *, cap: float) -> LossOutput:
    """The numerator above; ``policy/ratio_mean`` tells how far rows are off policy."""
    ratio = (inputs.logprobs - inputs.columns[BEHAVIOUR_LOGPROBS]).exp().detach()
    numerator = -(inputs.weights * ratio.clip(0.0, cap) * inputs.logprobs).sum()
    return LossOutput(numerator=numerator, metrics={"policy/ratio_mean": (ratio.sum(), len(inputs.logprobs), "mean")})
