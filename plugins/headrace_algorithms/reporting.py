"""What a batch says about rewards, groups and responses. A metric with nothing to measure is left out.

Names say what the mean is over: ``reward/mean`` is over trajectories, ``reward/prompt_mean`` over groups.
Response lengths count the tokens the policy sampled, never what an environment inserted, and include rows that are not
trained: they describe the rollout.
"""

from __future__ import annotations

import numpy as np

from headrace.contract import Array, Batch, Metric
from headrace.contract.columns import GREEDY_REWARD, TRUNCATED
from headrace_algorithms.advantages import EQUAL_TOLERANCE, GroupStatistics
from headrace_algorithms.rows import Groups, sampled_tokens


def mean_of(values: Array) -> Metric:
    """Mean over all entries of ``values`` ([n], n > 0)."""
    return Metric(total=float(np.sum(values, dtype=np.float64)), count=float(len(values)))


def reward_metrics(rewards: Array, statistics: GroupStatistics, *, first: Array) -> dict[str, Metric]:
    """Rewards over trajectories (``first``: bool [n], one row of each). A group is all right when every scored
    reward is at least 1, all wrong when none is above 0; ``equal_share`` is over groups with two or more scored
    trajectories, the others are ``undecided_share``. ``reward/std`` is over the batch (ddof 1)."""
    values = rewards[first & statistics.scored].astype(np.float64)
    decided = statistics.survivors >= 2
    some = statistics.survivors > 0
    metrics: dict[str, Metric] = {}
    if len(first):
        metrics["reward/unscored_share"] = mean_of(~statistics.scored[first])
        metrics["groups/undecided_share"] = mean_of(~decided)
    if len(values):
        metrics["reward/mean"] = mean_of(values)
        metrics["reward/prompt_mean"] = mean_of(statistics.mean[some])
        metrics["groups/all_right_share"] = mean_of(statistics.low[some] >= 1.0 - EQUAL_TOLERANCE)
        metrics["groups/all_wrong_share"] = mean_of(statistics.high[some] <= EQUAL_TOLERANCE)
    if len(values) > 1:
        metrics["reward/std"] = Metric(total=float(np.std(values, ddof=1)))
    if np.any(decided):
        metrics["groups/equal_share"] = mean_of(statistics.equal[decided])
    return metrics


def greedy_metrics(batch: Batch, groups: Groups) -> dict[str, Metric]:
    """The rewards of greedy answers, where there are any, over groups."""
    if GREEDY_REWARD not in batch.columns:
        return {}
    one = np.unique(groups.index, return_index=True)[1]
    rewards = batch.dense(GREEDY_REWARD)[one].astype(np.float64)
    known = rewards[np.isfinite(rewards)]
    return {"reward/greedy_mean": mean_of(known)} if len(known) else {}


def shaping_metrics(rewards: Array, shaped: Array, statistics: GroupStatistics, *, first: Array) -> dict[str, Metric]:
    """What shaping made of ``rewards``: over trajectories, and over groups with two or more scored ones, whose
    ``shaped`` rewards (of ``statistics``) decide whether they teach anything."""
    chosen, decided = first & statistics.scored, statistics.survivors >= 2
    metrics: dict[str, Metric] = {}
    if np.any(chosen):
        metrics["reward/shaped_mean"] = mean_of(shaped[chosen])
        metrics["reward/shaped_share"] = mean_of(shaped[chosen] != rewards[chosen])
    if np.any(decided):
        metrics["groups/equal_share"] = mean_of(statistics.equal[decided])
    return metrics


def response_metrics(batch: Batch) -> dict[str, Metric]:
    """Lengths of all rows, empty responses, and truncation where the batch says which rows were truncated."""
    if not len(batch):
        return {}
    lengths = sampled_tokens(batch)
    metrics = {"response/length": mean_of(lengths), "response/empty_share": mean_of(lengths == 0)}
    if TRUNCATED in batch.columns:
        metrics["response/truncated_share"] = mean_of(batch.dense(TRUNCATED))
    return metrics
