"""The named variants of ``grpo``: each against its paper's formula, written out anew."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.contract import Batch, LossInputs, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    PROXIMAL_LOGPROBS,
    REWARD,
    TRUNCATED,
)
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.variants import Cispo, Dapo, DrGrpo, Gspo, Longcat, MaxRl, Rloo, Sapo, Tbpo

LENGTHS = [3, 5]
REWARDS = [1.0, 0.0]


def prepared(algorithm: Grpo, rewards: list[float] = REWARDS, lengths: list[int] = LENGTHS) -> Any:
    """One group of rows with one prompt token and ``lengths`` sampled ones."""
    masks = [np.arange(length + 1) > 0 for length in lengths]
    return algorithm.prepare(
        Batch(
            rows=np.arange(len(rewards)),
            columns={
                LOSS_MASK: Ragged.from_arrays(masks),
                REWARD: np.array(rewards, dtype=np.float32),
                GROUP: np.zeros(len(rewards), dtype=np.int64),
                TRUNCATED: np.zeros(len(rewards), dtype=np.bool_),
            },
        )
    )


def loss_of(
    algorithm: Grpo, current: Tensor, behaviour: Tensor, proximal: Tensor, rewards: list[float] = REWARDS
) -> Tensor:
    """The loss of one optimiser step on one group, as an engine computes it."""
    found = prepared(algorithm, rewards)
    sampled = np.concatenate([np.arange(length + 1) > 0 for length in LENGTHS])
    inputs = LossInputs(
        logprobs=current,
        weights=torch.from_numpy(found.columns[LOSS_WEIGHTS].values[sampled]).double(),
        sequence=torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
        sequences=len(LENGTHS),
        columns={
            ADVANTAGES: torch.from_numpy(found.columns[ADVANTAGES].values[sampled]).double(),
            BEHAVIOUR_LOGPROBS: behaviour,
            PROXIMAL_LOGPROBS: proximal,
        },
        entropy=torch.ones_like(current),
    )
    spec = algorithm.loss(temperature=1.0)
    total: Tensor = policy_loss(inputs, **spec.settings).numerator / float(found.columns[DENOMINATOR].sum())
    return total


def policies(seed: int, scale: float = 0.3) -> tuple[Tensor, Tensor, Tensor]:
    """Current, behaviour and proximal log-probs, float64 [8]."""
    generator = torch.Generator().manual_seed(seed)
    current = -1.5 + torch.randn(sum(LENGTHS), generator=generator, dtype=torch.float64)
    moved = [current + scale * torch.randn(len(current), generator=generator, dtype=torch.float64) for _ in range(2)]
    return current, moved[0], moved[1]


def gradient_of(algorithm: Grpo, current: Tensor, behaviour: Tensor, proximal: Tensor) -> Tensor:
    leaf = current.clone().requires_grad_()
    loss_of(algorithm, leaf, behaviour, proximal).backward()
    assert leaf.grad is not None
    return leaf.grad


def test_gspo_clips_one_length_normalised_ratio_per_sequence() -> None:
    current, behaviour, proximal = policies(1)
    algorithm = Gspo(Gspo.Settings(clip_low=0.05, clip_high=0.1))
    total = 0.0
    for tokens, advantage in zip(torch.split(current - behaviour, LENGTHS), (0.5**0.5, -(0.5**0.5)), strict=True):
        ratio = math.exp(tokens.mean().item())
        total -= min(ratio * advantage, min(max(ratio, 0.95), 1.1) * advantage)
    assert loss_of(algorithm, current, behaviour, proximal).item() == pytest.approx(total / 2, rel=1e-6)


def test_cispo_has_the_gradient_of_capped_weights_before_log_probabilities() -> None:
    current, behaviour, proximal = policies(2, scale=2.0)
    weight = (current - behaviour).exp().clamp(max=5.0)
    assert (weight == 5.0).any()
    advantage = torch.repeat_interleave(torch.tensor([0.5**0.5, -(0.5**0.5)]).double(), torch.tensor(LENGTHS))
    expected = -weight * advantage / sum(LENGTHS)
    found = gradient_of(Cispo(Cispo.Settings()), current, behaviour, proximal)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)


def test_sapo_gates_softly_and_has_the_plain_gradient_at_a_ratio_of_one() -> None:
    current, behaviour, proximal = policies(3)
    algorithm = Sapo(Sapo.Settings(loss="clipped"))
    total = 0.0
    for tokens, advantage in zip(torch.split(current - behaviour, LENGTHS), (0.5**0.5, -(0.5**0.5)), strict=True):
        steepness = 1.0 if advantage > 0 else 1.05
        gate = [4 / steepness / (1 + math.exp(-steepness * (math.exp(d) - 1))) for d in tokens.tolist()]
        total -= advantage * sum(gate) / len(gate)
    assert loss_of(algorithm, current, behaviour, proximal).item() == pytest.approx(total / 2, rel=1e-6)
    plain = gradient_of(Grpo(Grpo.Settings(aggregation="sequence_mean_token_mean")), current, current, current)
    torch.testing.assert_close(gradient_of(algorithm, current, current, current), plain)


def test_longcat_bounds_three_sides_and_divides_by_the_longest_response() -> None:
    current, behaviour, proximal = policies(5, scale=1.5)
    algorithm = Longcat(Longcat.Settings(constant_length=16, dual_clip=2.0))
    weight = (proximal - behaviour).exp().clamp(max=2.0)
    ratio = (current - proximal).exp()
    advantage = torch.repeat_interleave(torch.tensor([0.5, -0.5]).double(), torch.tensor(LENGTHS))
    bounded = torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.28) * advantage)
    per_token = -weight * torch.where(advantage < 0, torch.maximum(bounded, 2.0 * advantage), bounded)
    assert (ratio > 2.0)[advantage < 0].any()
    expected = per_token.sum().item() / (2 * 16)
    assert loss_of(algorithm, current, behaviour, proximal).item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "expected"),
    [
        (Grpo(Grpo.Settings()), [1.207615, -0.724569]),
        (DrGrpo(DrGrpo.Settings(constant_length=8)), [0.625, -0.375]),
        (Rloo(Rloo.Settings()), [0.714286, -0.428571]),
        (MaxRl(MaxRl.Settings()), [5 / 3, -1.0]),
    ],
    ids=["grpo", "dr_grpo", "rloo", "maxrl"],
)
def test_three_of_eight_right_gives_each_estimator_its_closed_form(algorithm: Grpo, expected: list[float]) -> None:
    rewards = [1.0] * 3 + [0.0] * 5
    found = prepared(algorithm, rewards, [1] * 8).columns[ADVANTAGES].values[1::2]
    np.testing.assert_allclose(found, [expected[0]] * 3 + [expected[1]] * 5, rtol=1e-5)
    assert found.sum() == pytest.approx(0.0, abs=1e-5)


def test_dr_grpo_and_longcat_must_be_told_the_length_they_divide_by() -> None:
    for variant in (DrGrpo, Longcat):
        with pytest.raises(ValueError, match="needs a positive constant_length"):
            variant.Settings()


def test_dapo_leaves_truncated_answers_out() -> None:
    assert Dapo.Settings().mask_truncated
    assert Dapo.Settings().clip_high > Dapo.Settings().clip_low


# One response of four tokens: advantage, Δ, m → used r, gradient, w; bands 4e-4, 3e-4, 7e-4, cap 2.
TBPO_TABLE = [
    (+1, 0.0, 0.0, 1.0, True, 1.0),
    (+1, 3e-4, 0.0, 1.000300, True, 1.0),
    (+1, 5e-4, 0.0, 1.0004, False, 1.0),
    (+1, -0.5, 0.0, 0.606531, True, 1.0),
    (-1, -2e-4, 0.0, 0.999800, True, 1.0),
    (-1, -5e-4, 0.0, 0.9997, False, 1.0),
    (-1, 5e-4, 0.0, 1.000500, True, 1.0),
    (-1, 1e-3, 0.0, 1.0007, False, 1.0),
    (-1, 2.0, 0.0, 1.0007, False, 1.0),
    (+1, 0.0, 0.5, 1.0, True, 1.6487),
    (+1, 0.0, 1.0, 1.0, True, 2.0),
    (+1, 0.0, -1.0, 1.0, True, 0.3679),
]


def tbpo(advantage: float, delta: float, moved: float, length: int = 4, **settings: Any) -> tuple[float, Tensor]:
    """The loss of one response and its gradient: current = proximal + Δ, proximal = behaviour + m, on average."""
    uneven = torch.linspace(-0.5, 0.5, length, dtype=torch.float64)
    behaviour = torch.full((length,), -1.0, dtype=torch.float64)
    proximal = behaviour + moved + uneven
    current = (proximal + delta - uneven).requires_grad_()
    inputs = LossInputs(
        logprobs=current,
        weights=torch.full((length,), 1 / length, dtype=torch.float64),
        sequence=torch.zeros(length, dtype=torch.int64),
        sequences=1,
        columns={
            ADVANTAGES: torch.full((length,), float(advantage), dtype=torch.float64),
            BEHAVIOUR_LOGPROBS: behaviour,
            PROXIMAL_LOGPROBS: proximal,
        },
    )
    spec = Tbpo(Tbpo.Settings(report_entropy=False, **settings)).loss(temperature=1.0)
    output = policy_loss(inputs, **spec.settings)
    output.numerator.backward()
    assert current.grad is not None
    return output.numerator.item(), current.grad


@pytest.mark.parametrize(("advantage", "delta", "moved", "used", "on", "weight"), TBPO_TABLE)
def test_QRL_7_tbpo_has_its_table_line_by_line(
    advantage: float, delta: float, moved: float, used: float, on: bool, weight: float
) -> None:
    loss, gradient = tbpo(advantage, delta, moved)
    assert loss == pytest.approx(-advantage * used * weight, rel=1e-4)
    if on:
        torch.testing.assert_close(gradient, torch.full_like(gradient, loss / 4))
    else:
        assert not gradient.any()


def test_QRL_7_a_two_sided_weight_has_a_floor() -> None:
    assert tbpo(+1, 0.0, -1.0, importance_floor=0.5)[0] == pytest.approx(-0.5)


@pytest.mark.parametrize(("advantage", "delta"), [(+1.0, 2e-4), (-1.0, 6e-4), (-1.0, 9e-4)])
def test_QRL_6_repeating_the_response_changes_nothing(advantage: float, delta: float) -> None:
    assert tbpo(advantage, delta, 0.1, length=4)[0] == pytest.approx(tbpo(advantage, delta, 0.1, length=8)[0])


def gspo(advantage: float, delta: float) -> tuple[float, Tensor]:
    """As :func:`tbpo`, of a rollout by the proximal policy."""
    current = torch.full((4,), -1.0 + delta, dtype=torch.float64, requires_grad=True)
    inputs = LossInputs(
        logprobs=current,
        weights=torch.full((4,), 0.25, dtype=torch.float64),
        sequence=torch.zeros(4, dtype=torch.int64),
        sequences=1,
        columns={
            ADVANTAGES: torch.full((4,), advantage, dtype=torch.float64),
            BEHAVIOUR_LOGPROBS: torch.full((4,), -1.0, dtype=torch.float64),
        },
    )
    output = policy_loss(inputs, **Gspo(Gspo.Settings()).loss(temperature=1.0).settings)
    output.numerator.backward()
    assert current.grad is not None
    return output.numerator.item(), current.grad


def test_QRL_8_the_loss_of_a_failed_answer_is_bounded_whatever_its_tokens() -> None:
    for delta in (1.0, 10.0, 1e3):
        loss, _ = tbpo(-1.0, delta, delta)
        assert 0 < loss <= 2.0 * (1 + 7e-4)


def test_QRL_8_that_of_gspo_is_not_and_goes_on_to_push() -> None:
    assert gspo(-1.0, 2.0)[0] == pytest.approx(7.389, rel=1e-4)
    assert gspo(-1.0, 1e-3)[1].all()
    assert not tbpo(-1.0, 1e-3, 0.0)[1].any()


@pytest.mark.parametrize(("advantage", "delta"), [(+1.0, -0.3), (+1.0, 1e-3), (-1.0, -1e-3), (-1.0, 5e-4)])
def test_QRL_9_within_its_band_tbpo_is_gspo(advantage: float, delta: float) -> None:
    (ours, gradient), (theirs, plain) = tbpo(advantage, delta, 0.0), gspo(advantage, delta)
    assert ours == pytest.approx(theirs)
    torch.testing.assert_close(gradient, plain)


def test_QRL_5_the_first_mini_batch_after_a_rollout_is_not_clipped() -> None:
    current, behaviour, _ = policies(6)
    found = gradient_of(Tbpo(Tbpo.Settings()), current, behaviour, current)
    assert (found != 0).all()


def test_QRL_11_the_weight_carries_no_gradient() -> None:
    _, plain = tbpo(+1.0, 0.0, 0.0)
    _, weighted = tbpo(+1.0, 0.0, 0.5)
    torch.testing.assert_close(weighted, plain * math.exp(0.5))
