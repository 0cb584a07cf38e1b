"""What policy-gradient algorithms share: which rows and tokens count, for how much, and the policy loss.

Order of operations, which decides what shapes what:

1. rewards, less the penalty of over-long answers;
2. statistics of all scored trajectories of the group (truncated ones included);
3. the final mask: ``loss_mask`` within scored rows, less truncated rows if ``mask_truncated``;
4. the advantage of each token of that mask, which is where algorithms differ, whitened where that is asked for;
5. weights and denominators from that mask;
6. rejection by importance ratio, in the loss: numerator only.

Invariant: a group's answer depends on that group alone, or with whitening on its batch, bit for bit, in any order of
rows.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, fields

import numpy as np

from headrace.contract import Algorithm, Array, Batch, Column, LossSpec, Metric, Prepared, Ragged
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
from headrace_algorithms.advantages import GroupStatistics
from headrace_algorithms.aggregation import normalisers
from headrace_algorithms.loss_settings import LossSettings
from headrace_algorithms.reporting import greedy_metrics, response_metrics, reward_metrics, shaping_metrics
from headrace_algorithms.rows import Groups, count_true, first_rows, groups_of, per_token, trainable
from headrace_algorithms.settings import PolicySettings
from headrace_algorithms.shaping import generated_tokens, overlong_penalty


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Credit:
    """What each token is pushed by."""

    advantages: Ragged
    """float32, 0 outside the final mask."""
    teaches: Array
    """bool [n]: rows with a trainable token would have a gradient."""
    columns: Mapping[str, Column] = field(default_factory=dict)
    """Further ones that the loss reads."""
    metrics: Mapping[str, Metric] = field(default_factory=dict)


class PolicyGradient(Algorithm):
    """Subclasses say where advantages come from."""

    settings: PolicySettings

    @abstractmethod
    def statistics(self, batch: Batch, rewards: Array, groups: Groups, first: Array) -> GroupStatistics:
        """Of ``rewards`` (float [n]) as they are shaped; ``first``: bool [n], one row per trajectory."""

    @abstractmethod
    def credit(self, batch: Batch, rewards: Array, statistics: GroupStatistics, mask: Ragged, groups: Groups) -> Credit:
        """``rewards``: float [n], shaped; ``mask``: the final one."""

    def prepare(self, batch: Batch) -> Prepared:
        """Advantages, loss weights and denominators of whole groups; for whitening, of a whole batch.

        Reads ``loss_mask``, ``reward``, ``group``; ``trajectory`` where present (one baseline entry per
        trajectory); ``truncated``, which ``mask_truncated`` needs. Unscored rows (reward not finite) are outside
        statistics, weights and denominators. ``trained`` is False for rows without a gradient: no trainable
        token, or nothing that teaches. Their weights are 0, and their trainable tokens still count in the
        denominator, as they would if the row were sent through the model.
        """
        settings = self.settings
        groups, first, rewards = groups_of(batch), first_rows(batch), batch.dense(REWARD)
        statistics = self.statistics(batch, rewards, groups, first)
        metrics = reward_metrics(rewards, statistics, first=first) | response_metrics(batch)
        metrics |= greedy_metrics(batch, groups)
        if settings.overlong_length is not None:
            shaped = rewards + overlong_penalty(
                generated_tokens(batch), length=settings.overlong_length, buffer=settings.overlong_buffer
            )
            statistics = self.statistics(batch, shaped, groups, first)
            metrics |= shaping_metrics(rewards, shaped, statistics, first=first)
            rewards = shaped
        mask = trainable(batch, keep=statistics.scored & ~self._left_out(batch))
        tokens = count_true(mask)
        credit = self.credit(batch, rewards, statistics, mask, groups)
        if settings.whitening != "none":
            metrics["advantages/not_whitened"] = Metric(total=float(tokens.sum() < 2), reduction="sum")
        normal = normalisers(tokens, groups, aggregation=settings.aggregation, constant_length=settings.constant_length)
        trained = (tokens > 0) & credit.teaches
        return Prepared(
            columns={
                **credit.columns,
                ADVANTAGES: credit.advantages,
                LOSS_WEIGHTS: per_token(mask, np.where(trained, normal.weights, 0.0)),
                DENOMINATOR: normal.denominators,
            },
            trained=trained,
            metrics={**metrics, **credit.metrics},
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
            settings={each.name: getattr(settings, each.name) for each in fields(LossSettings)},
            columns=tuple(columns),
            temperature=temperature,
            entropy=settings.report_entropy or settings.entropy_coefficient > 0,
        )

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
