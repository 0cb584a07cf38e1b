"""``capped_rloo``: REINFORCE, each trajectory against the mean of the others of its group (arXiv:2402.14740).

    numerator    =  - sum over sampled tokens of  min(current / behaviour, cap) * advantage * log-prob
    denominator  =  scored trajectories of the optimiser step

The ratio has no gradient: it weighs tokens that an older version sampled, and the cap keeps one from outweighing all.
"""

from dataclasses import dataclass

import numpy as np

from headrace.contract import Algorithm, AlgorithmNeeds, Batch, LossInputs, LossOutput, LossSpec, Metric, Prepared


@dataclass(frozen=True, kw_only=True)
class RlooSettings:
    cap: float = 2.0  # what an importance ratio counts for at most


class Rloo(Algorithm):
    Settings = RlooSettings

    @classmethod
    def needs(cls, settings):
        return AlgorithmNeeds(min_group_size=2)

    def prepare(self, batch: Batch) -> Prepared:
        mask, reward = batch.ragged("loss_mask"), batch.dense("reward").astype(np.float64)
        scored, sampled = np.isfinite(reward), np.array([row.any() for row in mask], dtype=bool)
        advantage = advantages(reward, batch.dense("group"), order=batch.rows)
        weights = mask.like((np.repeat(advantage, mask.lengths) * mask.values).astype(np.float32))
        columns = {"loss_weights": weights, "denominator": scored.astype(np.float64)}
        mean = Metric(total=float(reward[scored].sum()), count=float(scored.sum()))
        return Prepared(columns=columns, trained=(advantage != 0) & sampled, metrics={"reward/mean": mean})

    def loss(self, *, temperature: float) -> LossSpec:
        function, settings = f"{__name__}:capped_policy_gradient", {"cap": self.settings.cap}
        return LossSpec(function=function, settings=settings, columns=("behaviour_logprobs",), temperature=temperature)


def advantages(reward, group, *, order):
    """Rows without a reward, and groups of equal ones, get 0. Sums are taken in one ``order``, whatever the batch's."""
    found = np.zeros(len(reward))
    for one in np.unique(group):
        members = np.flatnonzero((group == one) & np.isfinite(reward))
        rewards = reward[members[np.argsort(order[members])]]
        if len(members) > 1 and rewards.min() < rewards.max():
            found[members] = reward[members] - (rewards.sum() - reward[members]) / (len(members) - 1)
    return found


def capped_policy_gradient(inputs: LossInputs, *, cap: float) -> LossOutput:
    ratio = (inputs.logprobs - inputs.columns["behaviour_logprobs"]).exp().detach()
    return LossOutput(numerator=-(inputs.weights * ratio.clip(0.0, cap) * inputs.logprobs).sum())
