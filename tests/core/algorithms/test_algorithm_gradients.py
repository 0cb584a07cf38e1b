"""Gradients that the finite differences of whole losses do not reach, because something in them is held constant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.contract.columns import BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS
from headrace_algorithms.corrections import bounded_exp
from headrace_algorithms.kl import importance_weighted, kl_estimate
from headrace_algorithms.losses import cross_entropy
from support.losses import call, gradient, random_inputs, select

STEP = 1e-6
INPUTS = random_inputs(21)
CURRENT, BEHAVIOUR = INPUTS.logprobs, INPUTS.columns[BEHAVIOUR_LOGPROBS]
REFERENCE = INPUTS.columns[REFERENCE_LOGPROBS]
ESTIMATORS: Any = ("k1", "k2", "k3")


def differences(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    """Central ones of a sum over tokens."""
    steps = STEP * torch.eye(len(at), dtype=at.dtype)
    return torch.stack([(function(at + step) - function(at - step)).sum() / (2 * STEP) for step in steps])


def by_autograd(function: Callable[[Tensor], Tensor], at: Tensor) -> Tensor:
    leaf = at.clone().requires_grad_()
    function(leaf).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_each_kl_estimator_has_the_gradient_of_its_value(estimator: Any) -> None:
    def value(current: Tensor) -> Tensor:
        return kl_estimate(current, REFERENCE, estimator=estimator)

    torch.testing.assert_close(by_autograd(value, CURRENT), differences(value, CURRENT), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_weighted_estimators_have_it_too_with_the_weight_of_k2_held(estimator: Any) -> None:
    def value(current: Tensor) -> Tensor:
        estimate = kl_estimate(current, REFERENCE, estimator=estimator)
        return importance_weighted(estimate, current, BEHAVIOUR, estimator=estimator)

    def held(current: Tensor) -> Tensor:
        return kl_estimate(current, REFERENCE, estimator=estimator) * bounded_exp(CURRENT - BEHAVIOUR)

    expected = differences(held if estimator == "k2" else value, CURRENT)
    torch.testing.assert_close(by_autograd(value, CURRENT), expected, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"importance_level": "sequence_geometric"},
        {"importance_level": "sequence_product", "importance_floor": 0.5},
        {"keep_level": "sequence_product", "keep_cap": 1.5},
        {"kl_coefficient": 0.2},
        {"kl_coefficient": 0.2, "kl_estimator": "k1"},
        {"kl_coefficient": 0.2, "kl_estimator": "k2", "kl_importance": False},
    ],
)
def test_the_importance_loss_has_that_of_the_decoupled_one_around_the_policy_itself(options: dict[str, Any]) -> None:
    """There the weight and the anchor of the ratio are constants, so that it can be differentiated."""
    around = replace(INPUTS, columns={**INPUTS.columns, PROXIMAL_LOGPROBS: CURRENT})

    def decoupled(current: Tensor) -> Tensor:
        return call(around, current, loss="decoupled", **options).numerator

    expected = differences(decoupled, CURRENT)
    torch.testing.assert_close(gradient(INPUTS, loss="importance", **options), expected, rtol=1e-5, atol=1e-7)


def test_an_entropy_bonus_pushes_entropies_up_by_their_weights() -> None:
    def loss(entropy: Tensor) -> Tensor:
        return call(replace(INPUTS, entropy=entropy), entropy_coefficient=0.1).numerator

    found = by_autograd(loss, INPUTS.entropy)
    torch.testing.assert_close(found, differences(loss, INPUTS.entropy), rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(found, -0.1 * INPUTS.weights)


def test_cross_entropy_has_the_gradient_of_its_value_however_it_is_split() -> None:
    def loss(current: Tensor) -> Tensor:
        return cross_entropy(replace(INPUTS, logprobs=current)).numerator

    torch.testing.assert_close(by_autograd(loss, CURRENT), differences(loss, CURRENT), rtol=1e-6, atol=1e-8)
    parts = [cross_entropy(select(INPUTS, part)).numerator for part in ([3, 0], [2], [1])]
    torch.testing.assert_close(torch.stack(parts).sum(), loss(CURRENT))
