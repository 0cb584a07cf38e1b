"""A linear layer's weight as low-bit tensors, and the products by it (formulae: :mod:`headrace.contract.quantization`).

With inputs rounded per token, s_t = max|x_t| / largest and q_t = round(x_t / s_t):

    int8 by int8          y = s_t * s_o * (q_t . q_o)    sums of integers
    int4, in bfloat16     y = s_t * (q_t ŵᵀ), or x ŵᵀ    ŵ rounded to bfloat16, sums of float32
    otherwise             y = x̂ ŵᵀ                       sums of float32; x̂ = s_t * q_t, or x itself
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.contract.columns import Array
from headrace.contract.quantization import LARGEST, PACKED, SCALE, VALUES, LowBit, LowBitFormat, unpack_int4
from headrace_torch.arrays import as_tensor
from headrace_torch.low_bit.kernels import Product, int4_product, int8_product

_FEW_TOKENS = 8
"""Up to here weights of four bits are read as they are; for more tokens unpacking them anew takes longer than reading
them in bfloat16: at 8 of them 0.6 to 1 times as long, at 64 two to seven times."""
_SMALLEST = torch.finfo(torch.float32).tiny


class Rounded(NamedTuple):
    """Inputs on a low-bit grid."""

    values: Tensor
    """int8 or float8 [T, I]."""
    scales: Tensor
    """float32 [T, 1]."""

    def numbers(self) -> Tensor:
        """What they stand for, float32 [T, I]."""
        return self.values.float() * self.scales


def rounded(x: Tensor, kind: LowBit) -> Rounded:
    """``x`` [T, I], each token on a grid of its own: to nearest, ties to even."""
    x = x.float()
    scales = x.abs().amax(-1, keepdim=True).div_(LARGEST[kind]).clamp_min_(_SMALLEST)
    scaled = x / scales
    if kind == "float8_e4m3fn":
        limit = LARGEST[kind]
        return Rounded(scaled.clamp(-limit, limit).to(torch.float8_e4m3fn), scales)
    return Rounded(scaled.round_().to(torch.int8), scales)


@dataclass(frozen=True, eq=False)
class LowBitWeight:
    """Of [O, I]. It never changes: copies of a model share it."""

    activations: LowBit | None
    kind: LowBit
    values: Tensor
    """int8 (int4 too) or float8 [O, I]."""
    scales: Tensor
    """float32 [O, groups]."""
    group: int
    """Inputs to a scale."""

    @classmethod
    def of(cls, values: Tensor, scales: Tensor, fmt: LowBitFormat) -> LowBitWeight:
        """``values``: [O, I]; ``scales``: as the format has them."""
        (outputs, inputs), (high, wide) = values.shape, fmt.block
        own = scales.repeat_interleave(high or outputs, 0)[:outputs]
        return cls(fmt.activations, fmt.weights, values, own.contiguous(), wide or inputs)

    @staticmethod
    def joined(parts: Sequence[LowBitWeight]) -> LowBitWeight:
        """Of one product that gives what all of them give, side by side."""
        first = parts[0]
        values, scales = torch.cat([part.values for part in parts]), torch.cat([part.scales for part in parts])
        return LowBitWeight(first.activations, first.kind, values, scales, first.group)

    def __deepcopy__(self, memo: Any) -> LowBitWeight:
        return self

    @cached_property
    def numbers(self) -> Tensor:
        """ŵ, float32 [O, I]."""
        return self._dequantised()

    @cached_property
    def narrow_numbers(self) -> Tensor:
        """ŵ, rounded to bfloat16 [O, I]."""
        return self._dequantised().bfloat16()

    def numbers_in(self, dtype: torch.dtype) -> Tensor:
        """ŵ [O, I], kept in bfloat16 or float32."""
        return self.narrow_numbers if dtype == torch.bfloat16 else self.numbers

    def _dequantised(self) -> Tensor:
        by_weight = self.scales.repeat_interleave(self.group, 1)[:, : self.values.shape[1]]
        return self.values.float() * by_weight

    @cached_property
    def product(self) -> Product:
        """Takes inputs [T, I] of any dtype; gives outputs in it. What it does not need of the weight, it does not
        keep."""
        if self.kind == self.activations == "int8" and self.scales.shape[1] == 1:
            return _integers(int8_product(self.values), self.scales.T.contiguous())
        if self.kind == "int4":
            return lambda x: self._narrow(x) if x.dtype == torch.bfloat16 else self._wide(x)
        return self._wide

    def _wide(self, x: Tensor) -> Tensor:
        return F.linear(self.inputs(x), self.numbers).to(x.dtype)

    @cached_property
    def _narrow(self) -> Product:
        """Of bfloat16, by int4."""
        weight = self.narrow_numbers
        few = int4_product(self.values, self.scales, group=self.group)

        def multiply(x: Tensor) -> Tensor:
            return few(x) if few is not None and len(x) <= _FEW_TOKENS else F.linear(x, weight)

        return _scaled(multiply, self.activations) if self.activations else multiply

    def inputs(self, x: Tensor) -> Tensor:
        """What the product multiplies by, float32 [T, I]."""
        return rounded(x, self.activations).numbers() if self.activations else x.float()


def _integers(multiply: Product, scales: Tensor) -> Product:
    """``scales``: float32 [1, O]."""

    def product(x: Tensor) -> Tensor:
        values, own = rounded(x, "int8")
        return multiply(values).mul_(own).mul_(scales).to(x.dtype)

    return product


def _scaled(multiply: Product, activations: LowBit) -> Product:
    """Of rounded inputs, each of which bfloat16 has as it is; their scales come after the sum."""

    def product(x: Tensor) -> Tensor:
        values, own = rounded(x, activations)
        return (multiply(values.bfloat16()) * own).to(x.dtype)

    return product


def low_bit_weight(
    parts: Mapping[str, Array], fmt: LowBitFormat, *, columns: int, device: str | torch.device
) -> LowBitWeight:
    """From the parts of a weight with ``columns`` inputs, as they are published."""
    values = unpacked(parts[PACKED if fmt.weights == "int4" else VALUES], fmt, columns=columns)
    scales = torch.from_numpy(np.array(parts[SCALE]))
    return LowBitWeight.of(values.to(device), scales.to(device), fmt)


def unpacked(values: Array, fmt: LowBitFormat, *, columns: int) -> Tensor:
    """int8 or float8 [O, ``columns``]: a copy of the part that holds a weight's values."""
    return as_tensor(unpack_int4(values, columns=columns) if fmt.weights == "int4" else np.array(values))
