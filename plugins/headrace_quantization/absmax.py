"""Symmetric quantisation by the largest weight of each block: s = max|w| / largest, value = round(w / s), ŵ = s value.

Rounding is to nearest, ties to even; there is no zero point. Invariant: no weight is clamped, since the largest of a
block lies on the grid; and quantising ŵ gives the same tensors again.
"""

from __future__ import annotations

import numpy as np

from headrace.contract import Array
from headrace.contract.quantization import (
    LARGEST,
    PACKED,
    SCALE,
    VALUES,
    LowBitFormat,
    float8,
    pack_int4,
    per_weight,
    scale_shape,
)

_SMALLEST = np.finfo(np.float32).tiny
"""Of scales: those of blocks of zeros, and of weights too small to divide by."""


def quantize_blocks(weight: Array, fmt: LowBitFormat) -> dict[str, Array]:
    """The parts of ``weight``, float32 [O, I]. ValueError when it is not finite."""
    scales = block_scales(weight, fmt)
    scaled = weight / per_weight(scales, fmt, shape=weight.shape)
    if fmt.weights == "float8_e4m3fn":
        return {VALUES: float8(scaled), SCALE: scales}
    values = np.rint(scaled).astype(np.int8)
    return {PACKED: pack_int4(values), SCALE: scales} if fmt.weights == "int4" else {VALUES: values, SCALE: scales}


def block_scales(weight: Array, fmt: LowBitFormat) -> Array:
    """float32, one for each block."""
    rows, columns = weight.shape
    high, wide = fmt.block[0] or max(rows, 1), fmt.block[1] or max(columns, 1)
    tall, broad = scale_shape(fmt, shape=weight.shape)
    padded = np.zeros((tall * high, broad * wide), np.float32)
    padded[:rows, :columns] = np.abs(weight)
    largest = padded.reshape(tall, high, broad, wide).max(axis=(1, 3), initial=0)
    if not np.isfinite(largest).all():
        raise ValueError("a weight that is not finite has no low-bit form")
    return _settled(largest, np.float32(LARGEST[fmt.weights]))


def _settled(largest: Array, steps: np.float32) -> Array:
    """``largest`` / ``steps``, settled on a number that comes out again of the ŵ that it makes. A quotient may be
    rounded such that its product with ``steps`` is another ``largest``, whose quotient is the number next to it; the
    product of that is the same again."""
    scales = np.maximum(largest / steps, _SMALLEST)
    settled: Array = np.maximum(scales * steps / steps, _SMALLEST)
    return settled
