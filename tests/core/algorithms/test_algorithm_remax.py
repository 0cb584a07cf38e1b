"""``remax``: each reward against that of the greedy answer to its prompt (ReMax, arXiv:2310.10505, algorithm 1)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import Batch, LossInputs, Prepared, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GREEDY_REWARD,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REWARD,
    TRUNCATED,
)
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.variants import Remax

LENGTHS = [3, 5, 2, 4]
"""Sampled tokens of two groups of two."""
NAN = math.nan


def prepared(rewards: list[float], greedy: list[float], **settings: Any) -> Prepared:
    """Two groups of two; ``greedy``: of each group."""
    masks = [np.arange(length + 1) > 0 for length in LENGTHS]
    batch = Batch(
        rows=np.arange(4),
        columns={
            LOSS_MASK: Ragged.from_arrays(masks),
            REWARD: np.array(rewards, dtype=np.float32),
            GREEDY_REWARD: np.repeat(greedy, 2).astype(np.float32),
            GROUP: np.array([3, 3, 8, 8]),
            TRUNCATED: np.zeros(4, dtype=np.bool_),
        },
    )
    return Remax(Remax.Settings(**settings)).prepare(batch)


def advantages(found: Prepared) -> list[float]:
    """Of each row; all of its sampled tokens have the same."""
    column = found.columns[ADVANTAGES]
    assert isinstance(column, Ragged)
    for row in column:
        assert row[0] == 0
        assert np.ptp(row[1:]) == 0
    return [float(row[1]) for row in column]


@pytest.mark.parametrize(
    ("rewards", "greedy", "expected", "trained"),
    [
        # r - g, by hand; a right greedy answer makes right ones teach nothing, and wrong ones be avoided.
        ([1.0, 0.0, 0.5, 0.75], [1.0, 0.25], [0.0, -1.0, 0.25, 0.5], [False, True, True, True]),
        # Both answers are equal, and better than the greedy one: unlike a mean of the group, this teaches.
        ([1.0, 1.0, 0.0, 0.0], [0.0, 0.0], [1.0, 1.0, 0.0, 0.0], [True, True, False, False]),
        # An answer, or a greedy answer, that could not be scored.
        ([1.0, NAN, 0.5, 0.75], [0.5, NAN], [0.5, 0.0, 0.0, 0.0], [True, False, False, False]),
        # Differences that rounding makes are none.
        ([0.1 + 0.2, 0.3, -7.0, 7.0], [0.3, 0.0], [0.0, 0.0, -7.0, 7.0], [False, False, True, True]),
    ],
)
def test_an_advantage_is_the_reward_less_that_of_the_greedy_answer(
    rewards: list[float], greedy: list[float], expected: list[float], trained: list[bool]
) -> None:
    found = prepared(rewards, greedy)
    assert advantages(found) == pytest.approx(expected, abs=1e-7)
    assert np.asarray(found.trained).tolist() == trained
    scored = [math.isfinite(r) and math.isfinite(g) for r, g in zip(rewards, np.repeat(greedy, 2), strict=True)]
    assert (np.asarray(found.columns[DENOMINATOR]) > 0).tolist() == scored


def test_the_gradient_of_a_step_is_that_of_the_paper() -> None:
    """On-policy: (1/N) sum_i (r_i - g) sum_t grad log pi(a_t), whatever loss the weights and clips are built on."""
    found = prepared([1.0, 0.0, 0.5, 0.75], [1.0, 0.25])
    sampled = np.concatenate([np.arange(length + 1) > 0 for length in LENGTHS])
    current = torch.linspace(-2.0, -0.1, sum(LENGTHS), dtype=torch.float64, requires_grad=True)

    def column(name: str) -> torch.Tensor:
        ragged = found.columns[name]
        assert isinstance(ragged, Ragged)
        return torch.from_numpy(ragged.values[sampled]).double()

    inputs = LossInputs(
        logprobs=current,
        weights=column(LOSS_WEIGHTS),
        sequence=torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS)),
        sequences=4,
        columns={
            ADVANTAGES: column(ADVANTAGES),
            BEHAVIOUR_LOGPROBS: current.detach(),
            PROXIMAL_LOGPROBS: current.detach(),
        },
        entropy=torch.ones_like(current),
    )
    spec = Remax(Remax.Settings()).loss(temperature=1.0)
    loss = policy_loss(inputs, **spec.settings).numerator / float(np.asarray(found.columns[DENOMINATOR]).sum())
    loss.backward()
    expected = -np.repeat([0.0, -1.0, 0.25, 0.5], LENGTHS) / 4
    np.testing.assert_allclose(current.grad.numpy(), expected, atol=1e-12)  # type: ignore[union-attr]  # it is there


def test_the_rewards_of_greedy_answers_are_told_once_for_each_group() -> None:
    metrics = prepared([1.0, 0.0, 0.5, 0.75], [1.0, 0.25]).metrics
    assert metrics["reward/greedy_mean"].value == pytest.approx(0.625)
    assert metrics["reward/mean"].value == pytest.approx(0.5625), "the greedy answers are no samples"
    assert prepared([1.0] * 4, [NAN, 0.5]).metrics["reward/greedy_mean"].value == 0.5
    assert "reward/greedy_mean" not in prepared([1.0] * 4, [NAN, NAN]).metrics


def test_a_shift_of_the_batch_makes_no_group_teach_that_equals_its_greedy_answer() -> None:
    found = prepared([1.0, 1.0, 0.5, 0.75], [1.0, 0.0], whitening="shift_and_scale")
    assert advantages(found)[:2] == [0.0, 0.0]


def test_it_needs_greedy_rewards_and_no_group() -> None:
    needs = Remax.needs(Remax.Settings())
    assert needs.greedy_reward
    assert needs.min_group_size == 1
    assert not Remax.needs(Remax.Settings(baseline="group_mean")).greedy_reward


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"overlong_length": 100}, "overlong_length = 100 would shape rewards and not that of the greedy answer"),
        ({"credit": "turn"}, "of the greedy answer only the reward of the whole is known"),
        ({"advantage_scaling": "group_std"}, "baseline = 'greedy' takes none"),
    ],
)
def test_what_the_greedy_answer_does_not_tell_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Remax.Settings(**settings)
