"""Per-token estimators of KL(current || reference) (Schulman 2020, "Approximating KL divergence").

With x = log current - log reference of a token, and rho = current / behaviour of it:

    estimator   value             E[value], tokens from current   expected gradient, kl_importance False
    k1          x                 the KL                          0 (refused as a loss)
    k2          x^2 / 2           biased, close when small        that of KL(current || reference)
    k3          e^-x - 1 + x      the KL                          that of KL(reference || current)

With ``kl_importance`` each value is multiplied by rho. For k1 and k3 rho carries a gradient: behaviour samples
then give the KL and its gradient without bias (the form of DeepSeek-V3.2, arXiv:2512.02556, section 3.1). For
k2 rho is a constant, which keeps its gradient that of the KL. Per token this is exact for the distribution of
the token given its prefix; that prefixes too come from the behaviour policy is not corrected.

Invariant: every value is added to the loss, never subtracted, so a step on it alone lowers the KL.
"""

from __future__ import annotations

import torch
from torch import Tensor

from headrace_algorithms.corrections import LOG_LIMIT, bounded_exp
from headrace_algorithms.loss_settings import Estimator


def kl_estimate(current: Tensor, reference: Tensor, *, estimator: Estimator) -> Tensor:
    """[T], with gradient. ``current``, ``reference``: log-probs [T], nats."""
    difference = current - reference
    if estimator == "k1":
        return difference
    if estimator == "k2":
        return difference.square() / 2
    return torch.expm1((-difference).clamp(-LOG_LIMIT, LOG_LIMIT)) + difference


def importance_weighted(estimate: Tensor, current: Tensor, behaviour: Tensor, *, estimator: Estimator) -> Tensor:
    """[T]: ``estimate`` times current / behaviour, whose gradient is kept where the estimator needs it."""
    ratio = bounded_exp(current - behaviour)
    return estimate * (ratio.detach() if estimator == "k2" else ratio)
