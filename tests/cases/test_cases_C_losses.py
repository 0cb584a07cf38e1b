"""Cases C: policy loss, KL, clipping, non-finite values."""

from __future__ import annotations

import math
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.contract import LossInputs, LossOutput
from headrace.contract.columns import ADVANTAGES, BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS
from headrace.errors import ContractError
from headrace_algorithms.corrections import correct, importance_ratio
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.kl import kl_estimate
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.settings import GrpoSettings

POLICY = torch.tensor([0.6, -0.4, 0.1, -1.0], dtype=torch.float64)
REFERENCE = torch.tensor([-0.5, 0.3, 0.4, 0.2], dtype=torch.float64)
BEHAVIOUR = torch.tensor([0.1, 0.1, -0.3, -0.2], dtype=torch.float64)
"""Logits of three policies over four tokens."""


def call(
    current: Tensor,
    *,
    advantages: float | Tensor = 1.0,
    weights: Tensor | None = None,
    sequence: Tensor | None = None,
    behaviour: float | Tensor = 0.0,
    proximal: float | Tensor = 0.0,
    reference: float | Tensor = 0.0,
    **settings: Any,
) -> LossOutput:
    """The policy loss of ``current`` (log-probs, [T]) under ``settings``."""

    def column(value: float | Tensor) -> Tensor:
        return torch.as_tensor(value, dtype=current.dtype).expand(current.shape)

    index = sequence if sequence is not None else torch.zeros(current.shape[0], dtype=torch.int64)
    inputs = LossInputs(
        logprobs=current,
        weights=weights if weights is not None else torch.ones_like(current),
        sequence=index,
        sequences=int(index.max()) + 1 if len(index) else 1,
        columns={
            ADVANTAGES: column(advantages),
            BEHAVIOUR_LOGPROBS: column(behaviour),
            PROXIMAL_LOGPROBS: column(proximal),
            REFERENCE_LOGPROBS: column(reference),
        },
    )
    return policy_loss(inputs, **Grpo(GrpoSettings(**settings)).loss(temperature=1.0).settings)


def metric(output: LossOutput, name: str) -> float:
    total, count, reduction = output.metrics[name]
    return float(total) / count if reduction == "mean" else float(total)


def kl_gradient(logits: Tensor, *, sampler: Tensor, estimator: str, weighted: bool) -> tuple[float, Tensor]:
    """Expectation over all tokens drawn from ``sampler`` of the KL term, and its gradient by the policy's logits."""
    theta = logits.clone().requires_grad_()
    output = call(
        theta.log_softmax(0),
        advantages=0.0,
        weights=sampler.softmax(0),
        behaviour=sampler.log_softmax(0),
        reference=REFERENCE.log_softmax(0),
        loss="importance",
        kl_coefficient=1.0,
        kl_estimator=estimator,
        kl_importance=weighted,
    )
    output.numerator.backward()
    assert theta.grad is not None
    return output.numerator.item(), theta.grad


def exact_kl(logits: Tensor, other: Tensor, *, forward: bool = False) -> tuple[float, Tensor]:
    """KL(policy || other), or KL(other || policy) when ``forward``, and its gradient by the policy's logits."""
    theta = logits.clone().requires_grad_()
    p, q = theta.log_softmax(0), other.log_softmax(0)
    value = (q.exp() * (q - p)).sum() if forward else (p.exp() * (p - q)).sum()
    value.backward()
    assert theta.grad is not None
    return value.item(), theta.grad


@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
@pytest.mark.parametrize("sampler", [POLICY, BEHAVIOUR], ids=["on-policy", "off-policy"])
def test_C01_weighted_estimators_have_the_gradient_of_the_reverse_kl(estimator: str, sampler: Tensor) -> None:
    value, gradient = kl_gradient(POLICY, sampler=sampler, estimator=estimator, weighted=True)
    expected_value, expected = exact_kl(POLICY, REFERENCE)
    torch.testing.assert_close(gradient, expected)
    if estimator != "k2":
        assert value == pytest.approx(expected_value)


def test_C01_unweighted_k2_has_the_reverse_and_k3_the_forward_gradient_on_policy() -> None:
    _, k2 = kl_gradient(POLICY, sampler=POLICY, estimator="k2", weighted=False)
    _, k3 = kl_gradient(POLICY, sampler=POLICY, estimator="k3", weighted=False)
    torch.testing.assert_close(k2, exact_kl(POLICY, REFERENCE)[1])
    torch.testing.assert_close(k3, exact_kl(POLICY, REFERENCE, forward=True)[1])


def test_C01_k1_as_an_unweighted_loss_is_refused() -> None:
    with pytest.raises(ValueError, match="expected gradient of zero"):
        GrpoSettings(kl_coefficient=0.1, kl_estimator="k1", kl_importance=False)


def test_C02_point_values_of_the_estimators() -> None:
    current, reference = torch.tensor([-1.0]), torch.tensor([-1.5])
    values = {e: float(kl_estimate(current, reference, estimator=e)) for e in ("k1", "k2", "k3")}
    assert values == pytest.approx({"k1": 0.5, "k2": 0.125, "k3": 0.106531}, abs=1e-6)


@pytest.mark.parametrize(
    ("estimator", "weighted"), [("k1", True), ("k2", True), ("k3", True), ("k2", False), ("k3", False)]
)
def test_C02_steps_on_the_kl_alone_lower_it(estimator: str, weighted: bool) -> None:
    logits, values = POLICY.clone(), []
    for _ in range(20):
        values.append(exact_kl(logits, REFERENCE)[0])
        logits = logits - 0.5 * kl_gradient(logits, sampler=logits, estimator=estimator, weighted=weighted)[1]
    assert all(later < earlier for earlier, later in pairwise(values))


def test_C03_sequence_weights_are_over_the_tokens_of_their_own_sequence() -> None:
    settings: dict[str, Any] = {"loss": "importance", "importance_level": "sequence_geometric", "importance_cap": 9}
    current = torch.tensor([-1.0, -1.2, -0.3])
    alone = call(current, behaviour=torch.tensor([-1.3, -1.4, -0.9]), **settings)
    packed = call(
        torch.cat([torch.tensor([-4.0, -3.0]), current, torch.tensor([-7.0])]),
        advantages=torch.tensor([0.0, 0.0, 1.0, 1.0, 1.0, 0.0]),
        behaviour=torch.tensor([-1.0, -9.0, -1.3, -1.4, -0.9, -2.0]),
        sequence=torch.tensor([0, 0, 2, 2, 2, 3]),
        **settings,
    )
    assert packed.numerator.item() == pytest.approx(alone.numerator.item())
    assert alone.numerator.item() == pytest.approx(-3 * math.exp((0.3 + 0.2 + 0.6) / 3))


def test_C03_a_column_of_another_shape_is_refused() -> None:
    current = torch.zeros(3)
    inputs = LossInputs(
        logprobs=current,
        weights=current,
        sequence=torch.zeros(3, dtype=torch.int64),
        sequences=1,
        columns={ADVANTAGES: torch.zeros(1), BEHAVIOUR_LOGPROBS: current},
    )
    with pytest.raises(ContractError, match=r"advantages.*shape \(1,\).*shape \(3,\)"):
        policy_loss(inputs, **Grpo(GrpoSettings(loss="clipped")).loss(temperature=1.0).settings)


def test_C04_levels_and_bounds_of_importance_weights() -> None:
    moved = torch.tensor([-1.0, -1.0]) - torch.tensor([-2.0, -0.5])
    one = torch.zeros(2, dtype=torch.int64)
    token = importance_ratio(moved, one, 1, level="token")
    assert token.tolist() == pytest.approx([2.71828, 0.60653], abs=1e-5)
    capped = correct(moved, one, 1, GrpoSettings(importance_cap=2.0))
    assert capped.weight.tolist() == pytest.approx([2.0, 0.60653], abs=1e-5)
    band = correct(moved, one, 1, GrpoSettings(importance_floor=0.8, importance_cap=2.0))
    assert band.weight.tolist() == pytest.approx([2.0, 0.8])
    assert band.keep.all()
    assert importance_ratio(moved, one, 1, level="sequence_product").tolist() == pytest.approx([1.648721] * 2)
    assert importance_ratio(moved, one, 1, level="sequence_geometric").tolist() == pytest.approx([1.284025] * 2)


@pytest.mark.parametrize(
    ("level", "keep"),
    [
        ("token", [True, True, False, True, True]),
        ("sequence_product", [False, False, False, True, True]),
        ("sequence_geometric", [True, True, True, True, True]),
    ],
)
def test_C04_the_mask_has_a_level_and_bounds_of_its_own_and_leaves_weights_alone(level: Any, keep: list[bool]) -> None:
    """Sequences of ratios e^0.4, e^-0.1, e^0.9 (product e^1.2, mean e^0.4) and e^0.2, e^-0.3 (e^-0.1, e^-0.05), in a
    band from 0.6 to 2: e^0.9 is outside, and so is e^1.2."""
    moved = torch.tensor([0.4, -0.1, 0.9, 0.2, -0.3])
    settings = GrpoSettings(keep_level=level, keep_floor=0.6, keep_cap=2.0, importance_cap=1.3)
    found = correct(moved, torch.tensor([0, 0, 0, 1, 1]), 2, settings)
    assert found.keep.tolist() == keep
    assert found.weight.tolist() == pytest.approx(moved.exp().clamp(max=1.3).tolist())
    assert found.bounded.tolist() == [True, False, True, False, False]


@pytest.mark.parametrize(
    "bounds",
    [
        {"importance_floor": 2.0},
        {"importance_cap": 0.8},
        {"importance_floor": -1.0},
        {"keep_floor": 2.0},
        {"keep_cap": 0.8},
        {"keep_floor": -1.0},
    ],
)
def test_C04_bounds_that_would_exclude_an_on_policy_token_are_refused(bounds: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="out of bounds"):
        GrpoSettings(**bounds)


def test_C04_weights_carry_no_gradient() -> None:
    current = torch.tensor([-1.0], requires_grad=True)
    assert not importance_ratio(current + 2.0, torch.zeros(1, dtype=torch.int64), 1, level="token").requires_grad
    output = call(current, behaviour=-1.5, loss="importance")
    output.numerator.backward()
    assert current.grad is not None
    assert current.grad.item() == pytest.approx(-math.exp(0.5))


def test_C05_the_decoupled_loss_of_three_policies() -> None:
    output = call(torch.tensor([-1.0]), proximal=-1.2, behaviour=-1.5, loss="decoupled", clip_high=0.2)
    assert output.numerator.item() == pytest.approx(-1.619831, abs=1e-6)


@pytest.mark.parametrize("loss", ["clipped", "importance"])
def test_C05_staleness_is_visible_in_the_ratio(loss: str) -> None:
    output = call(torch.tensor([-1.0]), behaviour=-2.0, loss=loss)
    assert metric(output, "policy/ratio_max") == pytest.approx(math.e)
    assert metric(output, "mismatch/abs_logprob_diff_mean") == pytest.approx(1.0)


def test_C05_under_the_decoupled_loss_staleness_is_in_the_mismatch() -> None:
    output = call(torch.tensor([-1.0]), proximal=-1.0, behaviour=-2.0, loss="decoupled")
    assert metric(output, "policy/ratio_max") == pytest.approx(1.0)
    assert metric(output, "mismatch/ratio_max") == pytest.approx(math.e)


def test_C05_each_loss_declares_the_policies_it_needs() -> None:
    assert Grpo.needs(GrpoSettings(loss="decoupled")).proximal_logprobs
    assert not Grpo.needs(GrpoSettings(loss="clipped")).proximal_logprobs
    assert all(Grpo.needs(GrpoSettings(loss=x)).behaviour_logprobs for x in ("clipped", "decoupled", "importance"))


def test_C06_a_dual_clip_bounds_negative_advantages_only() -> None:
    current = torch.tensor([math.log(10.0)])
    shared: dict[str, Any] = {"loss": "clipped", "clip_high": 0.2}
    assert call(current, advantages=-1.0, dual_clip=3, **shared).numerator.item() == pytest.approx(3.0)
    assert call(current, advantages=-1.0, **shared).numerator.item() == pytest.approx(10.0)
    assert call(current, advantages=1.0, dual_clip=3, **shared).numerator.item() == pytest.approx(-1.2)


@pytest.mark.parametrize(
    "settings",
    [
        {"importance_floor": 0.5},
        {"importance_level": "sequence_product"},
        {"keep_floor": 0.5},
        {"keep_cap": 2.0},
        {"keep_level": "sequence_product", "keep_cap": 2.0},
    ],
)
def test_C06_corrections_that_the_clipped_loss_is_not_defined_for_are_refused(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="loss 'clipped'"):
        GrpoSettings(loss="clipped", **settings)


@pytest.mark.parametrize(
    "settings",
    [
        {"loss": "clipped", "ratio_level": "sequence"},
        {"loss": "importance"},
        {"loss": "clipped", "surrogate": "soft"},
        {"loss": "decoupled", "surrogate": "soft"},
    ],
    ids=["gspo", "cispo", "sapo", "decoupled-sapo"],
)
def test_C06_a_dual_clip_of_a_surrogate_that_it_is_not_defined_for_is_refused(settings: dict[str, Any]) -> None:
    GrpoSettings(**settings)
    with pytest.raises(ValueError, match="dual_clip"):
        GrpoSettings(dual_clip=3.0, **settings)


@pytest.mark.parametrize("loss", ["clipped", "decoupled", "importance"])
def test_C07_a_nan_reaches_the_loss_and_an_infinity_the_metrics(loss: str) -> None:
    broken = call(torch.tensor([-1.0, float("nan")]), behaviour=-1.0, proximal=-1.0, loss=loss)
    assert math.isnan(broken.numerator.item())
    infinite = call(torch.tensor([-1.0, -1.0]), behaviour=torch.tensor([-1.0, -math.inf]), proximal=-1.0, loss=loss)
    assert math.isinf(metric(infinite, "mismatch/abs_logprob_diff_max"))


@pytest.mark.parametrize("loss", ["clipped", "decoupled", "importance"])
@pytest.mark.parametrize("gap", [60.0, -60.0, 500.0])
def test_C07_a_huge_finite_ratio_stays_finite(loss: str, gap: float) -> None:
    current = torch.tensor([-1.0, -1.0], requires_grad=True)
    output = call(
        current,
        advantages=torch.tensor([0.0, -1.0]),
        behaviour=-1.0 - gap,
        proximal=-1.0 - gap / 2,
        reference=-1.0 + gap,
        loss=loss,
        kl_coefficient=0.1,
    )
    output.numerator.backward()
    assert current.grad is not None
    assert torch.isfinite(output.numerator)
    assert torch.isfinite(current.grad).all()
