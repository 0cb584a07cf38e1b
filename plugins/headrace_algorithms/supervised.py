"""The ``supervised`` algorithm: imitate demonstrations, token by token.

    loss = - sum over trainable tokens (log pi(token)) / number of trainable tokens of the optimiser step

Invariant: no rollout is involved; rewards and behaviour log-probs are never read.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.contract import Algorithm, AlgorithmNeeds, Batch, LossSpec, NoSettings, Prepared
from headrace.contract.columns import DENOMINATOR, LOSS_WEIGHTS
from headrace_algorithms.aggregation import normalisers
from headrace_algorithms.reporting import response_metrics
from headrace_algorithms.rows import count_true, groups_of, per_token, trainable


class Supervised(Algorithm):
    """Cross entropy on ``loss_mask``, averaged over tokens."""

    Settings = NoSettings

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        """Demonstrations only."""
        return AlgorithmNeeds(rollout=False, behaviour_logprobs=False)

    def prepare(self, batch: Batch) -> Prepared:
        """Weight 1 on every trainable token. Reads ``loss_mask`` and ``group``."""
        mask = trainable(batch, keep=np.ones(len(batch), dtype=np.bool_))
        tokens = count_true(mask)
        normal = normalisers(tokens, groups_of(batch), aggregation="token_mean")
        return Prepared(
            columns={LOSS_WEIGHTS: per_token(mask, normal.weights), DENOMINATOR: normal.denominators},
            trained=tokens > 0,
            metrics=response_metrics(batch),
        )

    def loss(self, *, temperature: float) -> LossSpec:
        """Demonstrations are imitated at temperature 1 by whatever samples later: log-probs are not tempered,
        and ``temperature`` is not used."""
        return LossSpec(function="headrace_algorithms.losses:cross_entropy")
