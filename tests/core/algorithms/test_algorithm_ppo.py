"""``ppo``: credit by a critic, and the loss of both, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace.contract import AlgorithmNeeds, Array, Batch, LossInputs, LossOutput, Prepared, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REWARD,
    VALUES,
)
from headrace.errors import ContractError
from headrace_algorithms.critic import actor_critic_loss, value_error
from headrace_algorithms.gae import RETURNS, generalised_advantages
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.ppo import Ppo

NAN = float("nan")
LENGTHS = torch.tensor([3, 1, 0, 4])
SPEC = Ppo(Ppo.Settings()).loss(temperature=1.0)


def rows_of(rewards: Sequence[float], masks: Sequence[Sequence[int]], values: Sequence[Sequence[float]]) -> Batch:
    """``values``: of trainable tokens; NaN elsewhere, which nothing may read."""
    arrays = [np.array(mask, dtype=np.bool_) for mask in masks]
    expected = [np.full(len(mask), NAN, dtype=np.float32) for mask in arrays]
    for row, mask, own in zip(expected, arrays, values, strict=True):
        row[mask] = own
    return Batch(
        rows=np.arange(len(rewards)),
        columns={
            LOSS_MASK: Ragged.from_arrays(arrays, dtype=np.bool_),
            VALUES: Ragged.from_arrays(expected, dtype=np.float32),
            REWARD: np.array(rewards, dtype=np.float32),
            GROUP: np.arange(len(rewards)),
        },
    )


def prepare(batch: Batch, **chosen: Any) -> Prepared:
    return Ppo(Ppo.Settings(**{"whitening": "none", **chosen})).prepare(batch)


def column(prepared: Prepared, name: str) -> Ragged:
    found = prepared.columns[name]
    assert isinstance(found, Ragged)
    return found


@pytest.mark.parametrize(
    ("trace_decay", "expected"),
    [
        (1.0, [0.0, 0.4, 0.9]),  # 0.25 * 2 - 0.5, 0.5 * 2 - 0.6, 2 - 1.1
        (0.0, [-0.2, -0.05, 0.9]),  # 0.5 * 0.6 - 0.5, 0.5 * 1.1 - 0.6, 2 - 1.1
        (0.5, [-0.15625, 0.175, 0.9]),  # -0.2 + 0.25 * 0.175, -0.05 + 0.25 * 0.9, 0.9
    ],
)
def test_advantages_by_hand(trace_decay: float, expected: list[float]) -> None:
    found = generalised_advantages(
        np.array([0.0, 0.0, 2.0]), np.array([0.5, 0.6, 1.1]), np.array([3]), discount=0.5, trace_decay=trace_decay
    )
    np.testing.assert_allclose(found, expected)


def test_rewards_on_the_way_count_from_where_they_came() -> None:
    """Turns of two and one tokens with rewards 1 and 2."""
    found = generalised_advantages(np.array([0.0, 1.0, 2.0]), np.zeros(3), np.array([3]), discount=0.5, trace_decay=1.0)
    np.testing.assert_allclose(found, [0.5 * 1 + 0.25 * 2, 1 + 0.5 * 2, 2])


@pytest.mark.parametrize(("discount", "first"), [(0.5, 1.0), (1.0, 2.0)])
def test_B13_what_stands_between_two_sampled_tokens_is_no_step_and_no_end(discount: float, first: float) -> None:
    prepared = prepare(rows_of([2], [[0, 1, 0, 0, 1, 0]], [[0, 0]]), discount=discount)
    assert column(prepared, ADVANTAGES)[0].tolist() == [0, first, 0, 0, 2, 0]


@settings(deadline=None)
@given(st.lists(st.lists(st.floats(-2, 2, width=32), max_size=5), min_size=1, max_size=6), st.randoms())
def test_a_row_s_credit_is_its_own(values: list[list[float]], random: Any) -> None:
    rewards = [float(len(row)) for row in values]
    batch = rows_of(rewards, [[0, *[1] * len(row)] for row in values], values)
    together = prepare(batch, trace_decay=0.9, discount=0.9)
    order = list(range(len(values)))
    random.shuffle(order)
    shuffled = prepare(batch.take(order), trace_decay=0.9, discount=0.9)
    for place, row in enumerate(order):
        alone = prepare(batch.take([row]), trace_decay=0.9, discount=0.9)
        for name in (ADVANTAGES, RETURNS):
            np.testing.assert_array_equal(column(shuffled, name)[place], column(together, name)[row])
            np.testing.assert_array_equal(column(alone, name)[0], column(together, name)[row])


def test_returns_are_what_came_and_not_whitened() -> None:
    batch = rows_of([1, 0], [[0, 1, 1], [0, 1]], [[0.5, 0.25], [0.75]])
    prepared = prepare(batch, whitening="shift_and_scale")
    assert column(prepared, RETURNS).values.tolist() == [0, 1, 1, 0, 0]
    raw = np.array([0.5, 0.75, -0.75])
    expected = (raw - raw.mean()) / raw.std(ddof=1)
    np.testing.assert_allclose(column(prepared, ADVANTAGES).values[[1, 2, 4]], expected, rtol=1e-6)


@pytest.mark.parametrize("pad", [0, 50])
def test_untrained_tokens_change_nothing(pad: int) -> None:
    batch = rows_of([1, 0], [[0, 1, 1] + [0] * pad, [0, 1] + [0] * pad], [[0.5, 0.25], [0.75]])
    prepared = prepare(batch, whitening="shift_and_scale")
    plain = prepare(rows_of([1, 0], [[0, 1, 1], [0, 1]], [[0.5, 0.25], [0.75]]), whitening="shift_and_scale")
    for name in (ADVANTAGES, RETURNS, LOSS_WEIGHTS):
        padded = column(prepared, name)
        assert [row[: len(own)].tolist() for row, own in zip(padded, column(plain, name), strict=True)] == [
            own.tolist() for own in column(plain, name)
        ]
        assert not any(row[3:].any() for row in padded)
    np.testing.assert_array_equal(np.asarray(prepared.columns[DENOMINATOR]), [2, 1])


def test_every_scored_row_with_a_token_trains_the_critic() -> None:
    batch = rows_of([1, NAN, 1, 1], [[0, 1], [0, 1], [0], [0, 1]], [[1.0], [0.5], [], [0.5]])
    prepared = prepare(batch)
    assert prepared.trained.tolist() == [True, False, False, True]
    assert column(prepared, ADVANTAGES).values.tolist() == [0, 0, 0, 0, 0, 0, 0.5]


@pytest.mark.parametrize(("values", "explained"), [([0.0, 1.0], 1.0), ([0.5, 0.5], 0.0), ([1.0, 0.0], -3.0)])
def test_the_report_says_how_much_of_the_returns_the_critic_foresaw(values: list[float], explained: float) -> None:
    prepared = prepare(rows_of([0, 1], [[0, 1], [0, 1]], [[v] for v in values]))
    assert prepared.metrics["value/explained_variance"].value == pytest.approx(explained)


def test_it_needs_a_critic_and_no_group() -> None:
    assert Ppo.needs(Ppo.Settings()) == AlgorithmNeeds(whole_batch=True, values=True, proximal_logprobs=True)
    assert not Ppo.needs(Ppo.Settings(whitening="none")).whole_batch
    assert Ppo(Ppo.Settings()).loss(temperature=1.0).values


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"discount": 0.0}, "discount must be above 0"),
        ({"trace_decay": 1.5}, "trace_decay must be 0 to 1"),
        ({"value_coefficient": 0.0}, "value_coefficient must be above 0"),
        ({"value_clip": 0.0}, "value_clip must be above 0"),
        ({"dual_clip": 0.5}, "dual_clip = 0.5 is out of bounds"),
    ],
)
def test_a_setting_that_cannot_be_is_refused(chosen: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Ppo.Settings(**chosen)


# ------------------------------------------------------------ the loss


@pytest.mark.parametrize(
    ("value", "old", "goal", "error", "slope"),
    [
        (0.6, 0.5, 1.0, 0.08, -0.4),  # within the clip: the squared error
        (0.9, 0.5, 1.0, 0.045, 0.0),  # moved further towards the return than it may: (0.7 - 1)^2 / 2
        (0.1, 0.5, 1.0, 0.405, -0.9),  # moved away: the larger error counts
        (0.1, 0.5, -1.0, 0.845, 0.0),  # towards a lower return: (0.3 + 1)^2 / 2
    ],
)
def test_the_critic_s_error_by_hand(value: float, old: float, goal: float, error: float, slope: float) -> None:
    values = torch.tensor([value], dtype=torch.float64, requires_grad=True)
    found = value_error(values, torch.tensor([old]).double(), torch.tensor([goal]).double(), clip=0.2)
    found.sum().backward()
    assert values.grad is not None
    assert found.item() == pytest.approx(error)
    assert values.grad.item() == pytest.approx(slope)


def random_inputs(seed: int) -> LossInputs:
    generator = torch.Generator().manual_seed(seed)
    tokens = int(LENGTHS.sum())

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    current, values = -1.5 + normal(0.5), normal(0.5)
    return LossInputs(
        logprobs=current,
        weights=torch.rand(tokens, generator=generator, dtype=torch.float64),
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), LENGTHS),
        sequences=len(LENGTHS),
        columns={
            ADVANTAGES: normal(1.0),
            BEHAVIOUR_LOGPROBS: current + normal(0.6),
            PROXIMAL_LOGPROBS: current + normal(0.3),
            VALUES: values + normal(0.5),
            RETURNS: normal(1.0),
        },
        values=values,
    )


def call(inputs: LossInputs, **chosen: Any) -> LossOutput:
    spec = Ppo(Ppo.Settings(report_entropy=False, **chosen)).loss(temperature=1.0)
    return actor_critic_loss(inputs, **spec.settings)


def select(inputs: LossInputs, sequences: Sequence[int]) -> LossInputs:
    tokens = torch.cat([torch.nonzero(inputs.sequence == s).flatten() for s in sequences])
    return replace(
        inputs,
        logprobs=inputs.logprobs[tokens],
        weights=inputs.weights[tokens],
        sequence=torch.tensor([list(sequences).index(int(s)) for s in inputs.sequence[tokens]], dtype=torch.int64),
        sequences=len(sequences),
        columns={name: values[tokens] for name, values in inputs.columns.items()},
        values=inputs.values[tokens],
    )


def gradients(inputs: LossInputs, **chosen: Any) -> tuple[Tensor, Tensor]:
    """By log-probs and by values."""
    leaves = inputs.logprobs.clone().requires_grad_(), inputs.values.clone().requires_grad_()
    call(replace(inputs, logprobs=leaves[0], values=leaves[1]), **chosen).numerator.backward()
    by_logprobs, by_values = (torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves)
    return by_logprobs, by_values


@pytest.mark.parametrize("clip", [0.3, math.inf])
def test_gradients_of_both_agree_with_finite_differences(clip: float) -> None:
    inputs = random_inputs(5)
    step, found = 1e-6, gradients(inputs, value_clip=clip)
    for name, gradient in zip(("logprobs", "values"), found, strict=True):
        for t in range(len(gradient)):
            offset = torch.zeros_like(gradient)
            offset[t] = step
            up, down = (
                call(replace(inputs, **{name: getattr(inputs, name) + sign * offset}), value_clip=clip).numerator.item()
                for sign in (1, -1)
            )
            assert gradient[t].item() == pytest.approx((up - down) / (2 * step), abs=1e-6)


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 4), order=st.permutations(range(4)))
def test_no_split_and_no_order_changes_the_sum_or_the_gradients(seed: int, cut: int, order: list[int]) -> None:
    inputs = random_inputs(seed)
    parts = [select(inputs, part) for part in (order[:cut], order[cut:]) if part]
    total = sum(call(part).numerator.item() for part in parts)
    assert total == pytest.approx(call(inputs).numerator.item(), rel=1e-9, abs=1e-12)
    tokens = torch.cat([torch.nonzero(inputs.sequence == s).flatten() for s in order])
    for whole, *split in zip(gradients(inputs), *(gradients(part) for part in parts), strict=True):
        torch.testing.assert_close(torch.cat(split), whole[tokens])


def test_the_critic_is_a_term_beside_the_policy_s_loss() -> None:
    inputs = random_inputs(6)
    both = call(inputs, value_coefficient=0.25)
    policy = {name: value for name, value in SPEC.settings.items() if not name.startswith("value_")}
    error = value_error(inputs.values, inputs.columns[VALUES], inputs.columns[RETURNS], clip=0.5)
    critic = both.numerator.item() - policy_loss(inputs, **policy).numerator.item()
    assert critic == pytest.approx(0.25 * (inputs.weights * error).sum().item())
    assert both.metrics["value/loss"][0].item() == pytest.approx(error.sum().item())
    by_logprobs, _ = gradients(inputs, value_coefficient=0.25)
    torch.testing.assert_close(by_logprobs, gradients(inputs, value_coefficient=9.0)[0])


def test_a_critic_without_values_is_an_error() -> None:
    with pytest.raises(ContractError, match="the loss trains a critic and got no values"):
        call(replace(random_inputs(7), values=None))


def test_a_micro_batch_without_tokens_adds_exactly_nothing() -> None:
    none: Array = np.zeros(0)
    empty = torch.from_numpy(none).requires_grad_()
    output = call(replace(select(random_inputs(8), [2]), logprobs=empty))
    assert output.numerator.item() == 0.0
    assert output.metrics == {}
