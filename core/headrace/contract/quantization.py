"""The ``quantization`` role: low-bit weights for the engines that generate (QaRL, arXiv 2604.07853).

A scheme chooses; how low-bit tensors are stored, and what they mean, follows from its :class:`LowBitFormat`, so that
every engine can read those of every scheme. A weight w [O, I] becomes parts that take its place under its name:

    weight          int8 or float8_e4m3fn [O, I]; or weight_packed, int32 [O, ceil(I / 8)], see :func:`pack_int4`
    weight_scale    float32 [rows of blocks, columns of blocks]

and stands for ŵ = value * the scale of its block, by which engines multiply. Pure functions of numpy arrays. Invariant:
whoever quantises the same weight gets the same bytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import ml_dtypes
import numpy as np

from headrace.contract.columns import Array
from headrace.contract.plugin import Plugin
from headrace.errors import ContractError

LowBit = Literal["int8", "int4", "float8_e4m3fn"]
"""Kinds of low-bit values."""

LARGEST: Mapping[LowBit, float] = {"int8": 127.0, "int4": 7.0, "float8_e4m3fn": 448.0}
"""Largest value of a kind, and the smallest without its sign: -128 and -8 are not used, so that grids are symmetric."""

LARGEST_ERROR: Mapping[LowBit, float] = {"int8": 0.05, "int4": 0.3, "float8_e4m3fn": 0.05}
"""Of a tensor, |ŵ - w| / |w| in Euclidean norms. Normally distributed weights have 0.01, 0.1 and 0.03; scales that do
not belong to them, 0.2 and more."""

VALUES, PACKED, SCALE = "weight", "weight_packed", "weight_scale"
_PER_WORD = 8
_OFFSET = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class LowBitFormat:
    """What is low-bit in a linear layer."""

    weights: LowBit
    block: tuple[int, int]
    """Outputs and inputs of a weight that share a scale; 0: all of them. Blocks at the edges may be smaller."""
    activations: LowBit | None = None
    """What a layer's inputs are rounded to, each token with the scale max|x| / LARGEST; None: they stay as they are."""


class Quantization(Plugin, ABC):
    """A scheme: which weights become low-bit, and how."""

    @property
    @abstractmethod
    def format(self) -> LowBitFormat:
        """Of every weight that it covers."""

    @abstractmethod
    def covers(self, name: str, *, shape: tuple[int, ...]) -> bool:
        """Whether the tensor of this Hugging Face name becomes low-bit. Embeddings, the output head, norms and routers
        usually stay as they are."""

    @abstractmethod
    def quantize(self, weight: Array) -> Mapping[str, Array]:
        """The parts of a weight, float32 [O, I]. ValueError when it is not finite."""


def quantized(scheme: Quantization, name: str, weight: Array) -> dict[str, Array]:
    """A weight's parts by full name. ContractError when the scheme gives parts that do not have its own format, or
    that stand for another weight: more than LARGEST_ERROR away from this one."""
    fmt, where = scheme.format, f"{type(scheme).__name__}.quantize"
    parts = dict(scheme.quantize(weight))
    expected = part_kinds(fmt, shape=weight.shape)
    found = {part: (array.dtype.name, array.shape) for part, array in parts.items()}
    if found != expected:
        raise ContractError(f"{name} was quantised to {found}; its format has {expected}", origin=where)
    error = relative_error(dequantize(parts, fmt, shape=weight.shape), weight)
    if not error <= LARGEST_ERROR[fmt.weights]:
        raise ContractError(
            f"{name} was quantised with a relative error of {error:.3g}; {fmt.weights} has at most "
            f"{LARGEST_ERROR[fmt.weights]:g}",
            origin=where,
            fix="compute scales anew from the weights that are quantised; keep tensors with outliers as they are",
        )
    return {f"{stem(name)}{part}": array for part, array in parts.items()}


def stem(name: str) -> str:
    """What the names of a weight's parts begin with."""
    return name.removesuffix(VALUES)


def part_kinds(fmt: LowBitFormat, *, shape: tuple[int, ...]) -> dict[str, tuple[str, tuple[int, int]]]:
    """Part → dtype name and shape, of a weight of this ``shape``."""
    rows, columns = shape
    if fmt.weights == "int4":
        values = {PACKED: ("int32", (rows, -(-columns // _PER_WORD)))}
    else:
        values = {VALUES: (fmt.weights, (rows, columns))}
    return {**values, SCALE: ("float32", scale_shape(fmt, shape=shape))}


def scale_shape(fmt: LowBitFormat, *, shape: tuple[int, ...]) -> tuple[int, int]:
    """How many blocks there are in each direction."""
    (rows, columns), (high, wide) = shape, fmt.block
    return (-(-rows // (high or rows or 1)), -(-columns // (wide or columns or 1)))


def per_weight(scales: Array, fmt: LowBitFormat, *, shape: tuple[int, ...]) -> Array:
    """float32 [O, I]: of each weight, its block's scale."""
    (rows, columns), (high, wide) = shape, fmt.block
    tall = np.repeat(scales, high or rows, axis=0)[:rows]
    whole: Array = np.repeat(tall, wide or columns, axis=1)[:, :columns]
    return whole


def dequantize(parts: Mapping[str, Array], fmt: LowBitFormat, *, shape: tuple[int, ...]) -> Array:
    """ŵ, float32 [O, I]."""
    values = unpack_int4(parts[PACKED], columns=shape[1]) if fmt.weights == "int4" else parts[VALUES]
    weight: Array = values.astype(np.float32) * per_weight(parts[SCALE], fmt, shape=shape)
    return weight


def relative_error(found: Array, weight: Array) -> float:
    """|found - weight| / |weight|, 0 where both are 0."""
    distance = float(np.linalg.norm(found - weight))
    return distance / float(np.linalg.norm(weight)) if distance else 0.0


def pack_int4(values: Array) -> Array:
    """int32 [O, ceil(I / 8)] of int8 values in -8…7 [O, I]: eight to a word, the first in the lowest four bits, each
    with 8 added. What fills the last word up is 0."""
    rows, columns = values.shape
    words = -(-columns // _PER_WORD)
    nibbles = np.full((rows, words * _PER_WORD), _OFFSET, np.uint32)
    nibbles[:, :columns] = values.astype(np.int32) + _OFFSET
    shifts = 4 * np.arange(_PER_WORD, dtype=np.uint32)
    packed: Array = np.bitwise_or.reduce(nibbles.reshape(rows, words, _PER_WORD) << shifts, axis=2)
    return packed.view(np.int32)


def unpack_int4(packed: Array, *, columns: int) -> Array:
    """int8 [O, ``columns``]: what :func:`pack_int4` packed."""
    shifts = 4 * np.arange(_PER_WORD, dtype=np.uint32)
    nibbles = (packed.view(np.uint32)[:, :, None] >> shifts) & 15
    values: Array = (nibbles.astype(np.int8) - _OFFSET).reshape(len(packed), -1)[:, :columns]
    return values


def float8(values: Array) -> Array:
    """Rounded to the nearest ``float8_e4m3fn``, ties to even; beyond the largest, that one."""
    limit = LARGEST["float8_e4m3fn"]
    rounded: Array = np.clip(values, -limit, limit).astype(ml_dtypes.float8_e4m3fn)
    return rounded
