"""Random inputs of the policy loss, and what it makes of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headrace.contract import LossInputs, LossOutput
from headrace.contract.columns import ADVANTAGES, BEHAVIOUR_LOGPROBS, PROXIMAL_LOGPROBS, REFERENCE_LOGPROBS
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.losses import policy_loss
from headrace_algorithms.settings import GrpoSettings

LENGTHS = torch.tensor([3, 1, 0, 4])
"""Trainable tokens of each sequence."""


def random_inputs(seed: int, *, lengths: Tensor = LENGTHS) -> LossInputs:
    """float64 inputs whose ratios lie on both sides of every bound."""
    generator = torch.Generator().manual_seed(seed)
    tokens = int(lengths.sum())

    def normal(scale: float) -> Tensor:
        return scale * torch.randn(tokens, generator=generator, dtype=torch.float64)

    current = -1.5 + normal(0.5)
    return LossInputs(
        logprobs=current,
        weights=torch.rand(tokens, generator=generator, dtype=torch.float64),
        entropy=torch.rand(tokens, generator=generator, dtype=torch.float64),
        sequence=torch.repeat_interleave(torch.arange(len(lengths)), lengths),
        sequences=len(lengths),
        columns={
            ADVANTAGES: normal(1.0),
            BEHAVIOUR_LOGPROBS: current + normal(0.6),
            PROXIMAL_LOGPROBS: current + normal(0.3),
            REFERENCE_LOGPROBS: current + normal(0.4),
        },
    )


def call(inputs: LossInputs, current: Tensor | None = None, **settings: Any) -> LossOutput:
    chosen = inputs if current is None else replace(inputs, logprobs=current)
    return policy_loss(chosen, **Grpo(GrpoSettings(**settings)).loss(temperature=1.0).settings)


def gradient(inputs: LossInputs, **settings: Any) -> Tensor:
    leaf = inputs.logprobs.clone().requires_grad_()
    call(inputs, leaf, **settings).numerator.backward()
    assert leaf.grad is not None
    return leaf.grad


def select(inputs: LossInputs, sequences: list[int]) -> LossInputs:
    """The micro-batch of ``sequences``, in that order."""
    tokens = torch.cat([torch.nonzero(inputs.sequence == s).flatten() for s in sequences])
    position = torch.tensor([sequences.index(int(s)) for s in inputs.sequence[tokens]], dtype=torch.int64)
    return LossInputs(
        logprobs=inputs.logprobs[tokens],
        weights=inputs.weights[tokens],
        sequence=position,
        sequences=len(sequences),
        columns={name: column[tokens] for name, column in inputs.columns.items()},
        entropy=inputs.entropy[tokens],
    )
