"""Losses written with operators alone: any tensor library computes them, and :class:`~.pertoken.PerToken` too."""

from __future__ import annotations

from headrace.contract import LossInputs, LossOutput


def weighted_likelihood(inputs: LossInputs) -> LossOutput:
    """Minus the sum of weighted log-probs; counts its tokens."""
    numerator = -(inputs.weights * inputs.logprobs).sum()
    return LossOutput(numerator=numerator, metrics={"loss/tokens": (len(inputs.logprobs), 1, "sum")})


def valued_likelihood(inputs: LossInputs) -> LossOutput:
    """Minus the sum of weighted log-probs, plus the weighted squares of how far values are from 1."""
    error = inputs.values - 1.0
    return LossOutput(numerator=(inputs.weights * error * error).sum() + weighted_likelihood(inputs).numerator)


def not_finite(inputs: LossInputs) -> LossOutput:
    """NaN, with a gradient of NaN."""
    return LossOutput(numerator=(float("nan") * inputs.logprobs).sum())
