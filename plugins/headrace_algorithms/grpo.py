"""The ``grpo`` algorithm: rewards relative to the group, a bounded policy-gradient loss, whole groups in.

Order of operations, which decides what shapes what:

1. rewards, less the penalty of over-long answers;
2. advantages from all scored trajectories of the group (truncated ones included);
3. the final mask: ``loss_mask`` within scored rows, less truncated rows if ``mask_truncated``;
4. whitening over the tokens of that mask, where it is asked for;
5. weights and denominators from that mask;
6. rejection by importance ratio, in the loss: numerator only.

Invariant: a group's answer depends on that group alone, or with whitening on its batch, bit for bit, in any order of
rows.
"""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np

from headrace.contract import Algorithm, AlgorithmNeeds, Array, Batch, LossSpec, Metric, Prepared
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TRUNCATED,
)
from headrace.errors import ConfigError, ContractError
from headrace_algorithms.advantages import GroupStatistics, group_relative
from headrace_algorithms.aggregation import normalisers
from headrace_algorithms.loss_settings import LossSettings
from headrace_algorithms.reporting import response_metrics, reward_metrics, shaping_metrics
from headrace_algorithms.rows import Groups, count_true, first_rows, groups_of, per_token, trainable
from headrace_algorithms.settings import GrpoSettings
from headrace_algorithms.shaping import generated_tokens, overlong_penalty
from headrace_algorithms.whitening import whitened


class Grpo(Algorithm):
    """Group-relative policy optimisation."""

    Settings = GrpoSettings
    settings: GrpoSettings

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        """Groups of two or more where rewards are compared with their mean; the whole batch for whitening; proximal
        log-probs for ``decoupled``; a reference when it is weighed."""
        return AlgorithmNeeds(
            min_group_size=2 if settings.baseline == "group_mean" else 1,
            whole_batch=settings.whitening != "none",
            proximal_logprobs=settings.loss == "decoupled",
            reference_logprobs=settings.kl_coefficient > 0,
        )

    def prepare(self, batch: Batch) -> Prepared:
        """Advantages, loss weights and denominators of whole groups; for whitening, of a whole batch.

        Reads ``loss_mask``, ``reward``, ``group``; ``trajectory`` where present (one baseline entry per
        trajectory); ``truncated``, which ``mask_truncated`` needs. Unscored rows (reward not finite) are outside
        statistics, weights and denominators. ``trained`` is False for rows without a gradient: no trainable
        token, or advantage 0 and neither KL nor entropy bonus. Their weights are 0, and the trainable tokens of
        rows with advantage 0 still count in the denominator, as they would if the row were sent through the model.
        """
        settings = self.settings
        groups, first, rewards = groups_of(batch), first_rows(batch), batch.dense(REWARD)
        statistics = self._statistics(rewards, groups, first)
        metrics = reward_metrics(rewards, statistics, first=first) | response_metrics(batch)
        if settings.overlong_length is not None:
            shaped = rewards + overlong_penalty(
                generated_tokens(batch), length=settings.overlong_length, buffer=settings.overlong_buffer
            )
            statistics = self._statistics(shaped, groups, first)
            metrics |= shaping_metrics(rewards, shaped, statistics, first=first)
        mask = trainable(batch, keep=statistics.scored & ~self._left_out(batch))
        tokens = count_true(mask)
        normal = normalisers(tokens, groups, aggregation=settings.aggregation, constant_length=settings.constant_length)
        advantages = self._whitened(statistics, tokens, groups.index)
        if settings.whitening != "none":
            metrics["advantages/not_whitened"] = Metric(total=float(tokens.sum() < 2), reduction="sum")
        trained = (tokens > 0) & ((advantages != 0) | self._anchored(statistics, groups.index))
        return Prepared(
            columns={
                ADVANTAGES: per_token(mask, advantages),
                LOSS_WEIGHTS: per_token(mask, np.where(trained, normal.weights, 0.0)),
                DENOMINATOR: normal.denominators,
            },
            trained=trained,
            metrics=metrics,
        )

    def loss(self, *, temperature: float) -> LossSpec:
        """The policy loss at the sampling temperature. ConfigError for a temperature that is not positive."""
        if not temperature > 0:
            raise ConfigError(
                f"temperature = {temperature} cannot be trained: log-probs are divided by it",
                fix="sample rollouts at a temperature above 0; greedy decoding is for evaluation",
            )
        settings = self.settings
        columns = [ADVANTAGES, BEHAVIOUR_LOGPROBS]
        if settings.loss == "decoupled":
            columns.append(PROXIMAL_LOGPROBS)
        if settings.kl_coefficient > 0:
            columns.append(REFERENCE_LOGPROBS)
        return LossSpec(
            function="headrace_algorithms.losses:policy_loss",
            settings={field.name: getattr(settings, field.name) for field in fields(LossSettings)},
            columns=tuple(columns),
            temperature=temperature,
            entropy=settings.report_entropy or settings.entropy_coefficient > 0,
        )

    def _statistics(self, rewards: Array, groups: Groups, first: Array) -> GroupStatistics:
        settings = self.settings
        scaling, baseline = settings.advantage_scaling, settings.baseline
        return group_relative(rewards, groups, first=first, scaling=scaling, baseline=baseline)

    def _whitened(self, statistics: GroupStatistics, tokens: Array, group_index: Array) -> Array:
        """float64 [n]. A group compared with its own mean teaches nothing when its rewards are equal, and a shift must
        not make it teach."""
        found = whitened(statistics.advantages, tokens, whitening=self.settings.whitening)
        if self.settings.baseline == "group_mean":
            found[statistics.equal[group_index]] = 0.0
        return found

    def _left_out(self, batch: Batch) -> Array:
        """bool [n]: truncated rows, where they are to be masked."""
        if not self.settings.mask_truncated:
            return np.zeros(len(batch), dtype=np.bool_)
        if TRUNCATED not in batch.columns:
            raise ContractError(
                f"mask_truncated needs the dense column {TRUNCATED!r}; this batch has {sorted(batch.columns)}",
                fix="whoever stores rows must store whether their generation ended for want of budget",
            )
        return batch.dense(TRUNCATED).astype(np.bool_)

    def _anchored(self, statistics: GroupStatistics, group_index: Array) -> Array:
        """bool [n]: rows that the KL or the entropy term trains whatever their advantage."""
        settings = self.settings
        everywhere = settings.kl_coefficient > 0 or settings.entropy_coefficient > 0
        return everywhere & (settings.regularise_equal_groups | ~statistics.equal[group_index])
