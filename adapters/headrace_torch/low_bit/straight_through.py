"""The gradient of a low-bit product, straight through its rounding (QaRL, arXiv 2604.07853; Bengio et al. 2013).

With y = x̂ ŵᵀ: the gradient of w is that of ŵ, gᵀ x̂, and the gradient of x that of x̂, g ŵ. Nothing is masked: a scheme
whose scales come from the largest weight, as those built in do, clamps none, and where another one does, a clamped
weight gets its gradient all the same, or it could never come back. Products are of the dtype of x, as those of a layer
that is not low-bit: ŵ and x̂ are rounded to it.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor

from headrace_torch.low_bit.weight import LowBitWeight
from headrace_torch.products import computed_in


def straight_through(x: Tensor, weight: Tensor, low_bit: LowBitWeight) -> Tensor:
    """x̂ ŵᵀ [T, O] in the dtype of ``x`` [T, I]. ``low_bit``: what ``weight`` [O, I] was quantised to."""
    return cast(Tensor, _StraightThrough.apply(x, weight, low_bit))  # type: ignore[no-untyped-call]  # torch's


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, low_bit: LowBitWeight) -> Tensor:
        ctx.save_for_backward(x)
        ctx.low_bit, ctx.dtype = low_bit, weight.dtype
        return low_bit.product(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x,), low_bit = ctx.saved_tensors, ctx.low_bit
        kind = computed_in(x)
        gradient = gradients[0].to(kind)
        of_x = (gradient @ low_bit.numbers_in(kind)).to(x.dtype) if ctx.needs_input_grad[0] else None
        of_weight = (gradient.T @ low_bit.inputs(x).to(kind)).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return of_x, of_weight, None
