"""The loss of a policy and of the critic beside it, in one sum.

Per trainable token, with the critic's value V, its value V_old at the start of the batch, and the return R:

    e         = max((V - R)^2, (clip(V, V_old - value_clip, V_old + value_clip) - R)^2) / 2
    numerator = that of the policy loss  +  value_coefficient * sum of v * e

(PPO, arXiv:1707.06347, equation 9; the clip is that of its first implementation: within it the gradient is that of the
squared error, and a value that moved further towards R than it may has none). Both terms have the same weights v and
the one denominator of the optimiser step. What the policy loss leaves out by its importance ratio still trains the
critic. Invariant: a micro-batch without tokens adds exactly 0.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from headrace.contract import LossInputs, LossOutput
from headrace.contract.columns import VALUES
from headrace.errors import ContractError
from headrace_algorithms.gae import RETURNS
from headrace_algorithms.losses import policy_loss, token_column, weighted_sum
from headrace_algorithms.mismatch import Metrics


def actor_critic_loss(
    inputs: LossInputs, *, value_coefficient: float, value_clip: float, **settings: Any
) -> LossOutput:
    """The formulae above. ``settings`` and columns of the policy loss, and float32 [T] each of values and returns.
    ContractError when one is missing, or ``LossInputs.values`` is."""
    policy = policy_loss(inputs, **settings)
    tokens = inputs.logprobs.shape[0]
    if tokens == 0:
        return policy
    values, old = _values(inputs), token_column(inputs, VALUES)
    error = value_error(values, old, token_column(inputs, RETURNS), clip=value_clip)
    metrics: Metrics = {
        "value/loss": (error.detach().sum(), tokens, "mean"),
        "value/mean": (values.detach().sum(), tokens, "mean"),
        "value/beyond_clip_share": (((values.detach() - old).abs() > value_clip).sum(), tokens, "mean"),
    }
    numerator = policy.numerator + value_coefficient * weighted_sum(inputs, error)
    return LossOutput(numerator=numerator, metrics={**policy.metrics, **metrics})


def value_error(values: Tensor, old: Tensor, returns: Tensor, *, clip: float) -> Tensor:
    """e, [T], with gradient."""
    bounded = torch.maximum(torch.minimum(values, old + clip), old - clip)
    return torch.maximum((values - returns).square(), (bounded - returns).square()) / 2


def _values(inputs: LossInputs) -> Tensor:
    values: Tensor | None = inputs.values
    if values is None:
        raise ContractError(
            "the loss trains a critic and got no values",
            fix="the training engine must compute them where LossSpec.values is set",
        )
    return values
