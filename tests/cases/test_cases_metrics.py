"""Cases L04 and L07, as far as an algorithm and its loss report them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from headrace.contract import Batch, LossInputs, Metric, Ragged, merge_metrics
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    GROUP,
    LOSS_MASK,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKENS,
    TRUNCATED,
)
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.settings import GrpoSettings


def rows_of(rewards: list[float], groups: list[int], *, lengths: list[int], truncated: list[bool]) -> Batch:
    masks = [np.array([False] + [True] * n) for n in lengths]
    return Batch(
        rows=np.arange(len(rewards), dtype=np.int64),
        columns={
            TOKENS: Ragged.from_arrays([np.zeros(len(m), dtype=np.int32) for m in masks]),
            LOSS_MASK: Ragged.from_arrays(masks),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.array(groups, dtype=np.int64),
            TRUNCATED: np.array(truncated),
        },
    )


def loss_metrics(logprobs: list[float], *, advantage: float = 1.0) -> dict[str, Metric]:
    """Metrics of the clipped loss for behaviour log-probs of 0, as the trainer's process would wrap them."""
    current = torch.tensor(logprobs)
    grpo = Grpo(GrpoSettings(loss="clipped", kl_coefficient=0.1))
    zero = torch.zeros_like(current)
    output = policy_loss(
        LossInputs(
            logprobs=current,
            weights=torch.ones_like(current),
            sequence=torch.zeros(len(logprobs), dtype=torch.int64),
            sequences=1,
            columns={
                ADVANTAGES: torch.full_like(current, advantage),
                BEHAVIOUR_LOGPROBS: zero,
                PROXIMAL_LOGPROBS: zero,
                REFERENCE_LOGPROBS: zero,
            },
            entropy=torch.full_like(current, 0.7),
        ),
        **grpo.loss(temperature=1.0).settings,
    )
    return {n: Metric(total=float(t), count=float(c), reduction=r) for n, (t, c, r) in output.metrics.items()}


def test_L04_sample_mean_and_prompt_mean_are_two_names() -> None:
    batch = rows_of([1, 0, 0, 0], [0, 1, 1, 1], lengths=[1] * 4, truncated=[False] * 4)
    metrics = Grpo(GrpoSettings()).prepare(batch).metrics
    assert metrics["reward/mean"].value == 0.25
    assert metrics["reward/prompt_mean"].value == 0.5


def test_L04_the_largest_ratio_over_micro_batches_is_the_larger_one() -> None:
    merged = merge_metrics([loss_metrics([math.log(3.0)]), loss_metrics([math.log(9.0), 0.0])])
    assert merged["policy/ratio_max"].value == pytest.approx(9.0)


def test_L04_a_token_mean_weighs_micro_batches_by_their_tokens() -> None:
    clipped, free = loss_metrics([1.0]), loss_metrics([0.0] * 9)
    assert clipped["policy/clip_share_high"].value == 1.0
    assert merge_metrics([clipped, free])["policy/clip_share_high"].value == pytest.approx(0.1)


def test_L07_the_default_set_is_reported_and_finite() -> None:
    batch = rows_of(
        [1, 1, 0, 0, 1, 0, float("nan"), 1],
        [0, 0, 1, 1, 2, 2, 2, 3],
        lengths=[1, 2, 3, 4, 5, 6, 0, 3],
        truncated=[False] * 5 + [True, True, False],
    )
    metrics = dict(Grpo(GrpoSettings()).prepare(batch).metrics) | loss_metrics([0.1, -0.2])
    assert {
        "reward/mean",
        "reward/std",
        "reward/prompt_mean",
        "reward/unscored_share",
        "groups/all_right_share",
        "groups/all_wrong_share",
        "groups/equal_share",
        "groups/undecided_share",
        "response/length",
        "response/empty_share",
        "response/truncated_share",
        "policy/entropy",
        "policy/ratio_mean",
        "policy/ratio_max",
        "policy/clip_share_low",
        "policy/clip_share_high",
        "policy/kl_reference",
        "mismatch/abs_logprob_diff_mean",
        "mismatch/abs_logprob_diff_max",
        "mismatch/k3",
        "mismatch/ratio_max",
        "mismatch/sequence_ratio_max",
        "mismatch/effective_sample_share",
        "mismatch/outside_share",
        "mismatch/rejected_share",
        "mismatch/tail_share",
        "mismatch/error_token_share",
        "mismatch/abs_logprob_diff_mean_from_1",
        "mismatch/sequence_log_ratio_from_1",
    } == set(metrics)
    assert all(math.isfinite(m.value) for m in metrics.values())
    values = {name: m.value for name, m in metrics.items()}
    assert values["groups/all_right_share"] == 0.5
    assert values["groups/all_wrong_share"] == 0.25
    assert values["groups/equal_share"] == pytest.approx(2 / 3)
    assert values["groups/undecided_share"] == 0.25
    assert values["reward/unscored_share"] == 1 / 8
    assert values["reward/std"] == pytest.approx(np.std([1, 1, 0, 0, 1, 0, 1], ddof=1))
    assert values["response/length"] == 3.0
    assert values["response/truncated_share"] == 0.25
    assert values["policy/entropy"] == pytest.approx(0.7)
