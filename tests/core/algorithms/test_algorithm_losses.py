"""The loss functions: closed forms, finite differences, and what no split or order may change."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contract import LossInputs
from headrace.contract.columns import ADVANTAGES, BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS
from headrace.errors import ContractError
from headrace_algorithms.losses import cross_entropy
from support.losses import call, gradient, random_inputs, select

SETTINGS: tuple[dict[str, Any], ...] = (
    {"loss": "clipped"},
    {"loss": "clipped", "dual_clip": 1.5, "kl_coefficient": 0.2, "kl_importance": False},
    {"loss": "clipped", "ratio_level": "sequence", "clip_low": 0.05, "clip_high": 0.05},
    {"loss": "clipped", "surrogate": "soft"},
    {"loss": "decoupled"},
    {"loss": "decoupled", "importance_level": "sequence_product", "kl_coefficient": 0.2, "kl_estimator": "k1"},
    {"loss": "decoupled", "keep_floor": 0.6, "keep_cap": 2.0},
    {"loss": "decoupled", "keep_level": "sequence_geometric", "keep_floor": 0.8, "keep_cap": 1.2},
    {"loss": "importance", "keep_level": "sequence_product", "keep_cap": 1.5, "kl_coefficient": 0.2},
    {"loss": "decoupled", "ratio_level": "sequence", "dual_clip": 1.1, "importance_level": "sequence_geometric"},
    {"loss": "decoupled", "surrogate": "soft", "entropy_coefficient": 0.1},
    {"loss": "importance", "importance_level": "sequence_geometric"},
    {"loss": "importance", "kl_coefficient": 0.2, "kl_estimator": "k2", "kl_importance": False},
)


def by_hand(inputs: LossInputs, t: int, *, loss: str, low: float, high: float, dual: float, cap: float) -> float:
    """The policy loss of one token, written out with scalars."""
    current, behaviour = float(inputs.logprobs[t]), float(inputs.columns[BEHAVIOUR_LOGPROBS][t])
    advantage, weight = float(inputs.columns[ADVANTAGES][t]), float(inputs.weights[t])
    proximal = float(inputs.columns[PROXIMAL_LOGPROBS][t])
    if loss == "clipped":
        ratio, rho = math.exp(current - behaviour), 1.0
    elif loss == "decoupled":
        ratio, rho = math.exp(current - proximal), min(math.exp(proximal - behaviour), cap)
    else:
        ratio, rho = 1.0, min(math.exp(current - behaviour), cap)
    if advantage < 0:
        ratio = min(ratio, dual)
    clipped = min(max(ratio, 1 - low), 1 + high)
    return -weight * rho * min(ratio * advantage, clipped * advantage)


@pytest.mark.parametrize("loss", ["clipped", "decoupled", "importance"])
@pytest.mark.parametrize("seed", range(3))
def test_each_loss_is_the_formula_of_its_docstring(loss: str, seed: int) -> None:
    inputs = random_inputs(seed)
    dual = math.inf if loss == "importance" else 1.5
    expected = sum(
        by_hand(inputs, t, loss=loss, low=0.1, high=0.3, dual=dual, cap=1.6) for t in range(len(inputs.logprobs))
    )
    output = call(inputs, loss=loss, clip_low=0.1, clip_high=0.3, dual_clip=dual, importance_cap=1.6)
    assert output.numerator.item() == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("options", [s for s in SETTINGS if s["loss"] != "importance"])
def test_gradients_agree_with_finite_differences(options: dict[str, Any]) -> None:
    inputs = random_inputs(5)
    step, found = 1e-6, gradient(inputs, **options)
    for t in range(len(found)):
        offset = torch.zeros_like(inputs.logprobs)
        offset[t] = step
        up, down = (call(inputs, inputs.logprobs + s * offset, **options).numerator.item() for s in (1, -1))
        assert found[t].item() == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_the_importance_loss_has_the_gradient_of_the_weighted_log_probability() -> None:
    inputs = random_inputs(6)
    rho = (inputs.logprobs - inputs.columns[BEHAVIOUR_LOGPROBS]).exp().clamp(max=2.0)
    expected = -inputs.weights * rho * inputs.columns[ADVANTAGES]
    torch.testing.assert_close(gradient(inputs, loss="importance"), expected)


def test_a_clipped_token_has_no_gradient_and_is_counted() -> None:
    inputs = random_inputs(7, lengths=torch.tensor([40]))
    ratio = (inputs.logprobs - inputs.columns[PROXIMAL_LOGPROBS]).exp()
    advantages = inputs.columns[ADVANTAGES]
    low, high = (advantages < 0) & (ratio < 0.8), (advantages > 0) & (ratio > 1.28)
    assert low.any()
    assert high.any()
    torch.testing.assert_close(gradient(inputs, loss="decoupled") == 0, low | high)
    metrics = call(inputs, loss="decoupled").metrics
    assert [int(metrics[f"policy/clip_share_{side}"][0]) for side in ("low", "high")] == [
        int(low.sum()),
        int(high.sum()),
    ]


@pytest.mark.parametrize("loss", ["clipped", "decoupled", "importance"])
def test_on_policy_every_loss_is_the_plain_policy_gradient(loss: str) -> None:
    inputs = random_inputs(8)
    same = inputs.logprobs
    columns = {**inputs.columns, BEHAVIOUR_LOGPROBS: same, PROXIMAL_LOGPROBS: same}
    on_policy = LossInputs(
        logprobs=same, weights=inputs.weights, sequence=inputs.sequence, sequences=inputs.sequences, columns=columns
    )
    expected = -inputs.weights * inputs.columns[ADVANTAGES]
    torch.testing.assert_close(gradient(on_policy, loss=loss), expected)
    assert call(on_policy, loss=loss).numerator.item() == pytest.approx(expected.sum().item())


@pytest.mark.parametrize("options", SETTINGS)
@settings(deadline=None, max_examples=20)
@given(seed=st.integers(0, 1000), cut=st.integers(0, 4), order=st.permutations(range(4)))
def test_no_split_and_no_order_changes_the_sum_or_the_gradient(
    options: dict[str, Any], seed: int, cut: int, order: list[int]
) -> None:
    inputs = random_inputs(seed)
    parts = [select(inputs, part) for part in (order[:cut], order[cut:]) if part]
    total = sum(call(part, **options).numerator.item() for part in parts)
    assert total == pytest.approx(call(inputs, **options).numerator.item(), rel=1e-9, abs=1e-12)
    whole = gradient(inputs, **options)
    tokens = torch.cat([torch.nonzero(inputs.sequence == s).flatten() for s in order])
    torch.testing.assert_close(torch.cat([gradient(part, **options) for part in parts]), whole[tokens])


@pytest.mark.parametrize("options", SETTINGS)
def test_metrics_carry_no_gradient(options: dict[str, Any]) -> None:
    inputs = random_inputs(9)
    output = call(inputs, inputs.logprobs.clone().requires_grad_(), **options)
    assert output.numerator.requires_grad
    for total, count, _ in output.metrics.values():
        assert not total.requires_grad
        assert isinstance(count, int)


def test_a_rejected_token_loses_its_kl_too() -> None:
    inputs = random_inputs(10)
    options: dict[str, Any] = {"loss": "decoupled", "keep_cap": 1.2}
    outside = (inputs.columns[PROXIMAL_LOGPROBS] - inputs.columns[BEHAVIOUR_LOGPROBS]).exp() > 1.2
    assert outside.any()
    assert not gradient(inputs, kl_coefficient=0.5, **options)[outside].any()


def test_cross_entropy_is_the_weighted_negative_log_likelihood() -> None:
    inputs = random_inputs(11)
    leaf = inputs.logprobs.clone().requires_grad_()
    output = cross_entropy(
        LossInputs(
            logprobs=leaf,
            weights=inputs.weights,
            sequence=inputs.sequence,
            sequences=inputs.sequences,
            columns={},
            entropy=torch.ones_like(leaf),
        )
    )
    output.numerator.backward()
    assert leaf.grad is not None
    assert output.numerator.item() == pytest.approx(-(inputs.weights * inputs.logprobs).sum().item())
    torch.testing.assert_close(leaf.grad, -inputs.weights)
    assert output.metrics["policy/entropy"][1] == len(leaf)


def test_a_micro_batch_without_tokens_adds_exactly_nothing() -> None:
    empty = random_inputs(12, lengths=torch.tensor([0, 0]))
    for output in (call(empty), cross_entropy(empty)):
        assert output.numerator.item() == 0.0
        assert output.metrics == {}


def test_an_entropy_bonus_lowers_the_loss_by_its_weighted_sum() -> None:
    inputs = random_inputs(13)
    bonus = call(inputs, loss="clipped", entropy_coefficient=0.1).numerator - call(inputs, loss="clipped").numerator
    assert bonus.item() == pytest.approx(-0.1 * (inputs.weights * inputs.entropy).sum().item())


def test_an_entropy_bonus_without_entropies_is_an_error() -> None:
    inputs = random_inputs(14)
    without = LossInputs(
        logprobs=inputs.logprobs,
        weights=inputs.weights,
        sequence=inputs.sequence,
        sequences=inputs.sequences,
        columns=inputs.columns,
    )
    with pytest.raises(ContractError, match="the loss got no entropy"):
        call(without, entropy_coefficient=0.1)
