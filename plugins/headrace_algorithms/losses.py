"""The losses, called per micro-batch in the trainer's process; each returns a sum that the engine divides once.

Policy loss. Per trainable token, with log-probs of the current policy, an anchor, the behaviour policy mu and a
reference, advantage A, entropy H and weight v (``loss_weights``):

    r   = current / anchor                       the ratio, bounded by the surrogate f (``surrogates``)
    rho = anchor / mu, bounded, no gradient      the importance weight, and which tokens are kept (``corrections``)
    l   = - rho * f(r, A)  +  kl_coefficient * KL (``kl``)  -  entropy_coefficient * H
    numerator = sum over kept tokens of v * l

    loss         anchor               rho              source
    clipped      mu                   1                PPO, arXiv:1707.06347; asymmetric clip, DAPO, arXiv:2503.14476
    decoupled    proximal policy      proximal / mu    arXiv:2110.00641; AReaL, arXiv:2505.24298
    importance   current, constant    current / mu     truncated importance sampling: r is 1 and no bound of r acts

A ratio of the sequence makes ``clipped`` the loss of GSPO, and ``decoupled``, with a dual clip and a weight of the
sequence, that of TBPO. ``importance`` has the gradient of CISPO's loss: weight and A are constants before log current.

Invariants: every term is a sum under the one denominator of the optimiser step; a micro-batch without tokens
adds exactly 0; finite log-probs give a finite sum, and a NaN gives NaN instead of being hidden.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.contract import LossInputs, LossOutput
from headrace.contract.columns import ADVANTAGES, BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS
from headrace.errors import ContractError
from headrace_algorithms.corrections import bounded_exp, correct
from headrace_algorithms.kl import importance_weighted, kl_estimate
from headrace_algorithms.loss_settings import Loss, LossSettings
from headrace_algorithms.mismatch import Metrics, mismatch_metrics
from headrace_algorithms.surrogates import bound_metrics, policy_ratio, surrogate


def policy_loss(inputs: LossInputs, **settings: Any) -> LossOutput:
    """The formulae above. ``settings``: fields of :class:`LossSettings`. ``inputs.columns``: float32 [T] each of
    advantages, behaviour log-probs, proximal ones for ``decoupled``, reference ones for a positive
    ``kl_coefficient``. ContractError when one is missing or of another shape."""
    chosen = LossSettings(**settings)
    current = inputs.logprobs
    tokens = current.shape[0]
    if tokens == 0:
        return LossOutput(numerator=current.sum())
    advantages, behaviour = token_column(inputs, ADVANTAGES), token_column(inputs, BEHAVIOUR_LOGPROBS)
    anchor = _anchor(inputs, chosen.loss, behaviour)
    moved = (current.detach() if chosen.loss == "clipped" else anchor) - behaviour
    correction = correct(moved, inputs.sequence, inputs.sequences, chosen)
    ratio = policy_ratio(current - anchor, inputs.sequence, inputs.sequences, level=chosen.ratio_level)
    metrics = mismatch_metrics(moved, behaviour, inputs.sequence, inputs.sequences)
    metrics["mismatch/outside_share"] = (correction.bounded.sum(), tokens, "mean")
    metrics["mismatch/rejected_share"] = ((~correction.keep).sum(), tokens, "mean")
    if chosen.loss == "importance":
        metrics |= _ratio_metrics(bounded_exp(moved))
    else:
        metrics |= _ratio_metrics(ratio.detach()) | bound_metrics(ratio.detach(), advantages, chosen)
    per_token = -surrogate(ratio, advantages, chosen)
    if chosen.loss != "clipped":
        per_token = correction.weight * per_token
    if chosen.kl_coefficient > 0:
        kl = kl_estimate(current, token_column(inputs, REFERENCE_LOGPROBS), estimator=chosen.kl_estimator)
        metrics["policy/kl_reference"] = (kl.detach().sum(), tokens, "mean")
        if chosen.kl_importance:
            kl = importance_weighted(kl, current, behaviour, estimator=chosen.kl_estimator)
        per_token = per_token + chosen.kl_coefficient * kl
    if chosen.entropy_coefficient > 0:
        per_token = per_token - chosen.entropy_coefficient * _entropy(inputs)
    per_token = torch.where(correction.keep, per_token, 0.0)
    return LossOutput(numerator=weighted_sum(inputs, per_token), metrics=metrics | _entropy_metrics(inputs))


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """numerator = - sum of ``weights * logprobs``."""
    return LossOutput(numerator=weighted_sum(inputs, -inputs.logprobs), metrics=_entropy_metrics(inputs))


def _anchor(inputs: LossInputs, loss: Loss, behaviour: Tensor) -> Tensor:
    if loss == "clipped":
        return behaviour
    if loss == "decoupled":
        return token_column(inputs, PROXIMAL_LOGPROBS)
    anchor: Tensor = inputs.logprobs.detach()
    return anchor


def _ratio_metrics(ratio: Tensor) -> Metrics:
    """``policy/ratio_mean|max``: of the ratio that the loss bounds, before it does: r, or current / behaviour
    under ``importance``."""
    return {
        "policy/ratio_mean": (ratio.sum(), ratio.shape[0], "mean"),
        "policy/ratio_max": (ratio.amax(), 1, "max"),
    }


def _entropy(inputs: LossInputs) -> Tensor:
    entropy: Tensor | None = inputs.entropy
    if entropy is None:
        raise ContractError(
            "entropy_coefficient is above 0 and the loss got no entropy",
            fix="the training engine must compute it where LossSpec.entropy is set",
        )
    return entropy


def _entropy_metrics(inputs: LossInputs) -> Metrics:
    if inputs.entropy is None or inputs.entropy.shape[0] == 0:
        return {}
    return {"policy/entropy": (inputs.entropy.detach().sum(), inputs.entropy.shape[0], "mean")}


def token_column(inputs: LossInputs, name: str) -> Tensor:
    """A token-aligned column; it never carries a gradient. ContractError when it is missing or of another shape."""
    column: Tensor | None = inputs.columns.get(name)
    shape = inputs.logprobs.shape
    if column is None or column.shape != shape:
        found = "is missing" if column is None else f"has shape {tuple(column.shape)}"
        raise ContractError(
            f"loss column {name!r} {found}; expected one value per trainable token, shape {tuple(shape)}",
            fix="the training engine must pass every column of LossSpec.columns, selected by loss_mask",
        )
    return column


def weighted_sum(inputs: LossInputs, per_token: Tensor) -> Tensor:
    """Of ``per_token`` ([T]). In float64: terms of both signs cancel, and what remains must not depend on the split."""
    weights: Tensor = inputs.weights
    return (weights * per_token).sum(dtype=torch.float64)
