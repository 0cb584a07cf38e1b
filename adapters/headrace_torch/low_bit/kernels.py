"""Products of low-bit values on this processor, chosen by trial: of the kernels that prove to be right, the quickest.

``torch._int_mm`` takes bytes with a sign, and sums their products in 32 bits. oneDNN's ``qlinear`` multiplies bytes
without a sign by bytes with one. Processors without VNNI add pairs of such products in 16 bits, which overflow when the
first factors are above 127; there, what is above zero and what is below are multiplied apart, as further rows, so that
weights are still read once.

``qlinear`` gives float32, which has every whole number up to 2^24. Invariant: where no sum of these weights can be
beyond it, sums of ``int8`` products are exact, whatever kernel they come from. Where one can, they are rounded: to
nearest from ``_int_mm``; by ``qlinear`` once for each token, whatever others it is among.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F

Product = Callable[[Tensor], Tensor]
"""[T, I] → [T, O]."""

INT4_GROUPS = (32, 64, 128, 256)
"""Inputs to a scale that torch's kernel for packed int4 knows."""
_INT4_OUTPUTS = 32
"""It wants a multiple of them."""
_ZERO = 8
"""The stored value that stands for 0."""
_WHOLE = 2**24
"""Up to here float32 has every whole number."""
_FEW_ROWS = 2
"""Up to here the kernel is used that is quickest for one, beyond that the one that is for 16."""
_TRIALS, _TRIED = 8, 2048
"""How often a kernel is timed, and with how many outputs and inputs at most."""


def int8_product(values: Tensor) -> Product:
    """``values``: int8 [O, I], -127 to 127. The product takes int8 too, in the same range, and gives float32."""
    ways = [way for way in _WAYS if values.device.type == "cpu" and _is_exact(way)]
    if not ways:
        return _floating(values)
    largest = _largest_sum(values)
    whole = [way for way in ways if _FACTORS[way] * largest <= _WHOLE]
    if not whole:  # kernels round differently: one of them, for any number of tokens
        return min(ways, key=lambda way: _FACTORS[way])(values)
    outputs, inputs = (min(extent, _TRIED) for extent in values.shape)
    for_few, for_many = (_quickest(tuple(whole), outputs, inputs, rows=rows) for rows in (1, 16))
    few = for_few(values)
    many = few if for_many is for_few else for_many(values)
    return lambda x: few(x) if len(x) <= _FEW_ROWS else many(x)


def _largest_sum(values: Tensor) -> int:
    """Of what is above zero in a row, or of what is below."""
    wide = values.int()
    return int(torch.maximum(wide.clamp(min=0).sum(1), -wide.clamp(max=0).sum(1)).max())


def _floating(values: Tensor) -> Product:
    """As float32 numbers: exact while sums are below 2^24, and off by its rounding beyond."""
    weight = values.float()
    return lambda x: F.linear(x.float(), weight)


def _signed(values: Tensor) -> Product:
    """Inputs as they are."""
    weight = values.T
    return lambda x: torch._int_mm(x, weight).float()


def _shifted(values: Tensor) -> Product:
    """Inputs with 128 added; the kernel takes off again what that adds."""
    multiply = _onednn(values, zero=128)
    return lambda x: multiply(x.view(torch.uint8) ^ 128)


def _parted(values: Tensor) -> Product:
    """Inputs above zero, and those below without their sign, as further rows."""
    multiply = _onednn(values, zero=0)

    def product(x: Tensor) -> Tensor:
        above, below = multiply(torch.cat((x.clamp(min=0), x.clamp(max=0).neg())).view(torch.uint8)).chunk(2)
        return above - below

    return product


_WAYS = (_signed, _shifted, _parted)
_FACTORS = {_signed: 127, _shifted: 255, _parted: 127}
"""The largest input that a kernel gets."""


def _onednn(values: Tensor, *, zero: int) -> Product:
    """Of uint8, whose ``zero`` stands for 0."""
    ops = torch.ops.onednn
    packed = ops.qlinear_prepack(values.contiguous(), None)
    ones = torch.ones(len(values))
    zeros = torch.zeros(len(values), dtype=torch.int64)

    def multiply(x: Tensor) -> Tensor:
        product: Tensor = ops.qlinear_pointwise(
            x, 1.0, zero, packed, ones, zeros, None, 1.0, 0, torch.float32, "none", [], ""
        )
        return product

    return multiply


@cache
def _is_exact(way: Callable[[Tensor], Product]) -> bool:
    """Whether the kernel is there and gives the largest sums of each sign, and others, as they are. With 512 inputs
    none is beyond what float32 has."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-127, 128, (64, 512), generator=generator, dtype=torch.int8)
    x = torch.randint(-127, 128, (5, 512), generator=generator, dtype=torch.int8)
    values[:2], x[:2] = 127, 127
    values[1], x[1] = -127, -127
    exact = (x.double() @ values.double().T).float()
    try:
        product = way(values)
        return all(torch.equal(product(x[:rows]), exact[:rows]) for rows in (1, 5))
    except (AttributeError, NotImplementedError, RuntimeError):  # this build of torch has no such kernel
        return False


@cache
def _quickest(
    ways: tuple[Callable[[Tensor], Product], ...], outputs: int, inputs: int, *, rows: int
) -> Callable[[Tensor], Product]:
    """Of exact kernels, for weights of this shape and this many tokens. Whichever it is, the numbers are the same."""
    if len(ways) == 1:
        return ways[0]
    values = torch.ones(outputs, inputs, dtype=torch.int8)
    x = torch.ones(rows, inputs, dtype=torch.int8)

    def seconds(way: Callable[[Tensor], Product]) -> float:
        product = way(values)
        took = []
        for _ in range(_TRIALS):
            started = time.perf_counter()
            product(x)
            took.append(time.perf_counter() - started)
        return min(took)

    return min(ways, key=seconds)


def int4_product(values: Tensor, scales: Tensor, *, group: int) -> Product | None:
    """``values``: int8 [O, I], -8 to 7; ``scales``: float32 [O, I / group], which are rounded to bfloat16. Takes and
    gives bfloat16, and reads weights of four bits. None where torch has no kernel for these shapes, or none that is
    right."""
    outputs, inputs = values.shape
    fits = group in INT4_GROUPS and inputs % group == 0 and outputs % _INT4_OUTPUTS == 0
    return _packed(values, scales, group) if fits and values.device.type == "cpu" and _int4_is_right() else None


def _packed(values: Tensor, scales: Tensor, group: int) -> Product:
    packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(values.int() + _ZERO, 1)
    by_group = torch.stack((scales.T, torch.zeros_like(scales.T)), dim=-1).bfloat16().contiguous()

    def product(x: Tensor) -> Tensor:
        found: Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x.contiguous(), packed, group, by_group)
        return found

    return product


@cache
def _int4_is_right() -> bool:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-8, 8, (64, 128), generator=generator, dtype=torch.int8)
    scales = (torch.rand(64, 4, generator=generator) + 0.5).bfloat16().float()
    x = torch.randn(3, 128, generator=generator).bfloat16()
    right = x.float() @ (values.float() * scales.repeat_interleave(32, 1)).T
    try:
        found = _packed(values, scales, 32)(x)
    except (AttributeError, NotImplementedError, RuntimeError):  # this build of torch has no such kernel
        return False
    return bool(torch.allclose(found.float(), right, rtol=2**-7, atol=2**-7 * float(right.abs().max())))
