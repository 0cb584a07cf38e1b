"""The ``grpo`` algorithm: rewards relative to the group, a bounded policy-gradient loss, whole groups in.

See :mod:`headrace_algorithms.policy` for the order of operations and what is the same in any such algorithm. Invariant:
a group compared with its own mean teaches nothing where its rewards are equal.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.contract import AlgorithmNeeds, Array, Batch, Ragged
from headrace.contract.columns import GREEDY_REWARD
from headrace_algorithms.advantages import GroupStatistics, group_relative
from headrace_algorithms.policy import Credit, PolicyGradient
from headrace_algorithms.rows import Groups, count_true, per_token, spread
from headrace_algorithms.settings import GrpoSettings
from headrace_algorithms.turns import turn_groups, turns_of
from headrace_algorithms.whitening import whitened


class Grpo(PolicyGradient):
    """Group-relative policy optimisation."""

    Settings = GrpoSettings
    settings: GrpoSettings

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        """Groups of two or more where rewards are compared with their mean, greedy answers where with those; the whole
        batch for whitening; proximal log-probs for ``decoupled``; a reference when it is weighed."""
        return AlgorithmNeeds(
            min_group_size=2 if settings.baseline == "group_mean" else 1,
            whole_batch=settings.whitening != "none",
            turn_rewards=settings.credit == "turn",
            greedy_reward=settings.baseline == "greedy",
            proximal_logprobs=settings.loss == "decoupled",
            reference_logprobs=settings.kl_coefficient > 0,
        )

    def statistics(self, batch: Batch, rewards: Array, groups: Groups, first: Array) -> GroupStatistics:
        """Advantages among them."""
        greedy = batch.dense(GREEDY_REWARD).astype(np.float64) if self.settings.baseline == "greedy" else None
        return self._relative(rewards, groups, first, greedy)

    def _relative(self, rewards: Array, groups: Groups, first: Array, greedy: Array | None) -> GroupStatistics:
        scaling, baseline = self.settings.advantage_scaling, self.settings.baseline
        return group_relative(rewards, groups, first=first, scaling=scaling, baseline=baseline, greedy=greedy)

    def credit(self, batch: Batch, rewards: Array, statistics: GroupStatistics, mask: Ragged, groups: Groups) -> Credit:
        """One advantage for all tokens of a trajectory, or of a turn, compared with the same turn of the others."""
        if self.settings.credit == "turn":
            turns = turns_of(batch, rewards)
            together, every = turn_groups(turns, groups, batch.rows), np.ones(len(turns.row), dtype=np.bool_)
            of_turn, chosen = self._relative(turns.returns, together, every, None), turns.of_token[mask.values]
            tokens = np.bincount(chosen, minlength=len(turns.row))
            column = spread(mask, self._whitened(of_turn, tokens, together.index)[chosen])
        else:
            column = per_token(mask, self._whitened(statistics, count_true(mask), groups.index))
        pushed = count_true(column.like(column.values != 0)) > 0
        return Credit(advantages=column, teaches=pushed | self._anchored(statistics, groups.index))

    def _whitened(self, statistics: GroupStatistics, tokens: Array, group_index: Array) -> Array:
        """float64, as ``statistics.advantages``. No shift of the batch makes a group of equal rewards teach."""
        advantages = whitened(statistics.advantages, tokens, whitening=self.settings.whitening)
        if self.settings.baseline != "none":
            advantages[statistics.equal[group_index]] = 0.0
        return advantages

    def _anchored(self, statistics: GroupStatistics, group_index: Array) -> Array:
        """bool [n]: rows that the KL or the entropy term trains whatever their advantage."""
        settings = self.settings
        everywhere = settings.kl_coefficient > 0 or settings.entropy_coefficient > 0
        return everywhere & (settings.regularise_equal_groups | ~statistics.equal[group_index])
