"""The ``ppo`` algorithm: rewards against what a critic expected, token by token (arXiv:1707.06347).

The critic is the trainer's, beside the policy, and learns with it (:mod:`headrace_algorithms.critic`); each token's
advantage is :mod:`headrace_algorithms.gae`'s. A trajectory's reward comes after the last trainable token of each of its
rows, or that of each turn after the last one of the turn. Invariant: no group is needed, and every row with a trainable
token is trained, since the critic learns from it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from headrace.contract import AlgorithmNeeds, Array, Batch, LossSpec, Metric, Ragged
from headrace.contract.columns import VALUES
from headrace_algorithms.advantages import GroupStatistics, group_relative
from headrace_algorithms.gae import RETURNS, generalised_advantages
from headrace_algorithms.policy import Credit, PolicyGradient
from headrace_algorithms.rows import Groups, count_true, spread
from headrace_algorithms.settings import PolicySettings
from headrace_algorithms.turns import came_after, turns_of
from headrace_algorithms.whitening import Whitening, whitened


@dataclass(frozen=True, slots=True, kw_only=True)
class PpoSettings(PolicySettings):
    """Settings of ``ppo``."""

    whitening: Whitening = "shift_and_scale"
    discount: float = 1.0
    """Of what comes one trainable token later."""
    trace_decay: float = 1.0
    """Lambda: 1 compares with what came in the end, 0 with what the critic expected one token later."""
    value_coefficient: float = 0.5
    """Weight of the critic's error in the loss. It reads the policy's hidden states, so that it shapes them too."""
    value_clip: float = 0.5
    """How far a value may move from what it was at the start of the batch; ``inf``: any way."""

    def __post_init__(self) -> None:
        PolicySettings.__post_init__(self)
        rules = (
            ("discount", 0 < self.discount <= 1, "above 0 and up to 1"),
            ("trace_decay", 0 <= self.trace_decay <= 1, "0 to 1"),
            ("value_coefficient", 0 < self.value_coefficient < math.inf, "above 0 and finite"),
            ("value_clip", self.value_clip > 0, "above 0"),
        )
        for name, holds, rule in rules:
            if not holds:
                raise ValueError(f"{name} must be {rule}, got {getattr(self, name)}")


class Ppo(PolicyGradient):
    """Proximal policy optimisation with a critic."""

    Settings = PpoSettings
    settings: PpoSettings

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        """A critic; the whole batch for whitening; proximal log-probs for ``decoupled``; a reference when weighed."""
        return AlgorithmNeeds(
            whole_batch=settings.whitening != "none",
            turn_rewards=settings.credit == "turn",
            values=True,
            proximal_logprobs=settings.loss == "decoupled",
            reference_logprobs=settings.kl_coefficient > 0,
        )

    def statistics(self, batch: Batch, rewards: Array, groups: Groups, first: Array) -> GroupStatistics:
        """For the report alone."""
        return group_relative(rewards, groups, first=first, scaling="none", baseline="none")

    def credit(self, batch: Batch, rewards: Array, statistics: GroupStatistics, mask: Ragged, groups: Groups) -> Credit:
        """Generalised advantages, whitened, and the returns that they were made with."""
        settings, tokens = self.settings, count_true(mask)
        values = batch.ragged(VALUES).values[mask.values].astype(np.float64)
        came = self._came_after(batch, rewards, mask, tokens)
        found = generalised_advantages(
            came, values, tokens, discount=settings.discount, trace_decay=settings.trace_decay
        )
        returns = found + values
        advantages = whitened(found, np.ones(len(found), dtype=np.int64), whitening=settings.whitening)
        return Credit(
            advantages=spread(mask, advantages),
            teaches=np.ones(len(batch), dtype=np.bool_),
            columns={RETURNS: spread(mask, returns)},
            metrics=_explained(values, returns),
        )

    def _came_after(self, batch: Batch, rewards: Array, mask: Ragged, tokens: Array) -> Array:
        """float64: of each trainable token, what was earned between it and the next."""
        if self.settings.credit == "turn":
            return came_after(turns_of(batch, rewards), mask)
        came, some = np.zeros(int(tokens.sum())), tokens > 0
        came[np.cumsum(tokens)[some] - 1] = rewards[some]
        return came

    def loss(self, *, temperature: float) -> LossSpec:
        """Of policy and critic, at the sampling temperature. ConfigError for a temperature that is not positive."""
        spec, settings = super().loss(temperature=temperature), self.settings
        own = {"value_coefficient": settings.value_coefficient, "value_clip": settings.value_clip}
        return replace(
            spec,
            function="headrace_algorithms.critic:actor_critic_loss",
            settings={**spec.settings, **own},
            columns=(*spec.columns, VALUES, RETURNS),
            values=True,
        )


def _explained(values: Array, returns: Array) -> dict[str, Metric]:
    """``value/explained_variance``: 1 where the critic foresaw every return, 0 where it knows only their mean."""
    spread = float(np.var(returns)) if len(returns) else 0.0
    if spread == 0:
        return {}
    share = 1 - float(np.var(returns - values)) / spread
    return {"value/explained_variance": Metric(total=share * len(returns), count=float(len(returns)))}
