"""An algorithm of ten lines: each trajectory is pushed by how much its reward beats the mean of its group."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.contract import Algorithm, AlgorithmNeeds, Batch, LossSpec, Metric, NoSettings, Prepared
from headrace.contract.columns import DENOMINATOR, GROUP, LOSS_MASK, LOSS_WEIGHTS, REWARD


class FakeAlgorithm(Algorithm):
    """Rows without a reward are outside means, weights and denominators. Rewards are added in the order of row ids, so
    that the order of a batch changes no bit."""

    Settings = NoSettings

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        return AlgorithmNeeds(min_group_size=2)

    def prepare(self, batch: Batch) -> Prepared:
        mask, reward, group = batch.ragged(LOSS_MASK), batch.dense(REWARD).astype(np.float64), batch.dense(GROUP)
        scored = np.isfinite(reward)
        advantage = np.zeros(len(batch))
        for g in np.unique(group):
            members = np.flatnonzero((group == g) & scored)
            if len(members) and np.ptp(reward[members]) > 0:
                ordered = members[np.argsort(batch.rows[members])]
                advantage[members] = reward[members] - reward[ordered].mean()
        weights = np.repeat(advantage, mask.lengths) * mask.values
        counts = np.array([tokens.sum() for tokens in mask], dtype=np.float64)
        return Prepared(
            columns={
                LOSS_WEIGHTS: mask.like(weights.astype(np.float32)),
                DENOMINATOR: np.where(scored, counts, 0.0),
            },
            trained=(advantage != 0) & (counts > 0),
            metrics={"reward/mean": Metric(total=float(reward[scored].sum()), count=float(scored.sum()))},
        )

    def loss(self, *, temperature: float) -> LossSpec:
        return LossSpec(function="headrace.testing.losses:weighted_likelihood", temperature=temperature)
