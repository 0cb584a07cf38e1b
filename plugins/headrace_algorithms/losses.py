"""The losses, called per micro-batch in the trainer's process; each returns a sum that the engine divides once.

Policy loss. Per trainable token, with log-probs of the current policy, an anchor, the behaviour policy mu and a
reference, advantage A and weight v (``loss_weights``):

    r   = current / anchor                       the ratio that the clip bounds
    rho = anchor / mu, bounded, no gradient      the importance weight (``corrections``)
    l   = - rho * min(r A, clip(r, 1 - clip_low, 1 + clip_high) A)  +  kl_coefficient * KL (``kl``)
    numerator = sum over kept tokens of v * l

    loss         anchor               rho              source
    clipped      mu                   1                PPO, arXiv:1707.06347; asymmetric clip, DAPO, arXiv:2503.14476
    decoupled    proximal policy      proximal / mu    arXiv:2110.00641; AReaL, arXiv:2505.24298
    importance   current, constant    current / mu     truncated importance sampling: r is 1 and no clip acts

Under ``clipped`` the cap bounds r instead: min(r, importance_cap) replaces r. The clip already bounds positive
advantages, so this acts on negative ones only (dual clip, arXiv:1912.09729).

Invariants: every term is a sum under the one denominator of the optimiser step; a micro-batch without tokens
adds exactly 0; finite log-probs give a finite sum, and a NaN gives NaN instead of being hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace.contract import LossInputs, LossOutput
from headrace.contract.columns import ADVANTAGES, BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS
from headrace.errors import ContractError
from headrace_algorithms.corrections import bounded_exp, correct, importance_ratio
from headrace_algorithms.kl import importance_weighted, kl_estimate
from headrace_algorithms.mismatch import Metrics, mismatch_metrics
from headrace_algorithms.settings import Estimator, Level, Loss, Outside


def policy_loss(
    inputs: LossInputs,
    *,
    loss: Loss,
    clip_low: float,
    clip_high: float,
    importance_cap: float,
    importance_floor: float,
    importance_level: Level,
    importance_outside: Outside,
    kl_coefficient: float,
    kl_estimator: Estimator,
    kl_importance: bool,
) -> LossOutput:
    """The formulae above. ``inputs.columns``: float32 [T] each of advantages, behaviour log-probs, proximal ones
    for ``decoupled``, reference ones for a positive ``kl_coefficient``. ContractError when one is missing or of
    another shape."""
    current = inputs.logprobs
    tokens = current.shape[0]
    if tokens == 0:
        return LossOutput(numerator=current.sum())
    advantages, behaviour = _column(inputs, ADVANTAGES), _column(inputs, BEHAVIOUR_LOGPROBS)
    anchor = _anchor(inputs, loss, behaviour)
    moved = (current.detach() if loss == "clipped" else anchor) - behaviour
    correction = correct(
        importance_ratio(moved, inputs.sequence, inputs.sequences, level=importance_level),
        floor=importance_floor,
        cap=importance_cap,
        outside=importance_outside,
    )
    ratio = bounded_exp(current - anchor)
    metrics = mismatch_metrics(moved, inputs.sequence, inputs.sequences)
    metrics["mismatch/outside_share"] = (correction.outside.sum(), tokens, "mean")
    if loss == "importance":
        metrics |= _ratio_metrics(bounded_exp(moved))
    else:
        metrics |= _ratio_metrics(ratio.detach())
        metrics |= _clip_metrics(ratio.detach(), advantages, clip_low, clip_high)
    if loss == "clipped":
        per_token = -_surrogate(ratio.clamp(max=importance_cap), advantages, clip_low, clip_high)
    else:
        per_token = -correction.weight * _surrogate(ratio, advantages, clip_low, clip_high)
    if kl_coefficient > 0:
        kl = kl_estimate(current, _column(inputs, REFERENCE_LOGPROBS), estimator=kl_estimator)
        metrics["policy/kl_reference"] = (kl.detach().sum(), tokens, "mean")
        if kl_importance:
            kl = importance_weighted(kl, current, behaviour, estimator=kl_estimator)
        per_token = per_token + kl_coefficient * kl
    if correction.keep is not None:
        per_token = torch.where(correction.keep, per_token, 0.0)
    return LossOutput(numerator=_weighted_sum(inputs, per_token), metrics=metrics | _entropy(inputs))


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """numerator = - sum of ``weights * logprobs``."""
    return LossOutput(numerator=_weighted_sum(inputs, -inputs.logprobs), metrics=_entropy(inputs))


def _anchor(inputs: LossInputs, loss: Loss, behaviour: Tensor) -> Tensor:
    if loss == "clipped":
        return behaviour
    if loss == "decoupled":
        return _column(inputs, PROXIMAL_LOGPROBS)
    anchor: Tensor = inputs.logprobs.detach()
    return anchor


def _surrogate(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Tensor:
    """min(r A, clip(r) A), [T]."""
    return torch.minimum(ratio * advantages, ratio.clamp(1 - clip_low, 1 + clip_high) * advantages)


def _ratio_metrics(ratio: Tensor) -> Metrics:
    """``policy/ratio_mean|max``: of the ratio that the loss bounds, before it does: r, or current / behaviour
    under ``importance``."""
    return {
        "policy/ratio_mean": (ratio.sum(), ratio.shape[0], "mean"),
        "policy/ratio_max": (ratio.amax(), 1, "max"),
    }


def _clip_metrics(ratio: Tensor, advantages: Tensor, clip_low: float, clip_high: float) -> Metrics:
    """``policy/clip_share_low|high``: share of tokens whose gradient the clip removed at that side."""
    low = (advantages < 0) & (ratio < 1 - clip_low)
    high = (advantages > 0) & (ratio > 1 + clip_high)
    return {
        "policy/clip_share_low": (low.sum(), ratio.shape[0], "mean"),
        "policy/clip_share_high": (high.sum(), ratio.shape[0], "mean"),
    }


def _entropy(inputs: LossInputs) -> Metrics:
    if inputs.entropy is None or inputs.entropy.shape[0] == 0:
        return {}
    return {"policy/entropy": (inputs.entropy.detach().sum(), inputs.entropy.shape[0], "mean")}


def _column(inputs: LossInputs, name: str) -> Tensor:
    """A token-aligned column; it never carries a gradient."""
    column: Tensor | None = inputs.columns.get(name)
    shape = inputs.logprobs.shape
    if column is None or column.shape != shape:
        found = "is missing" if column is None else f"has shape {tuple(column.shape)}"
        raise ContractError(
            f"loss column {name!r} {found}; expected one value per trainable token, shape {tuple(shape)}",
            fix="the training engine must pass every column of LossSpec.columns, selected by loss_mask",
        )
    return column


def _weighted_sum(inputs: LossInputs, per_token: Tensor) -> Tensor:
    """Summed in float64: terms of both signs cancel, and what remains must not depend on the split."""
    weights: Tensor = inputs.weights
    return (weights * per_token).sum(dtype=torch.float64)
