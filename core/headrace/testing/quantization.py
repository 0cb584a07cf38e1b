"""A scheme of a few lines: int8 weights, whose scales are powers of two, so that all its arithmetic is exact."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from headrace.contract import Array, LowBitFormat, Quantization
from headrace.contract.quantization import LARGEST, SCALE, VALUES
from headrace.errors import ContractError
from headrace.testing.trouble import FakeSettings, Trouble


class FakeQuantization(Quantization):
    """A piece of work is a weight quantised."""

    Settings = FakeSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._trouble = Trouble(settings, error=ContractError)

    @property
    def format(self) -> LowBitFormat:
        return LowBitFormat(weights="int8", block=(1, 0), activations="int8")

    def covers(self, name: str, *, shape: tuple[int, ...]) -> bool:
        return len(shape) == 2 and name.endswith("_proj.weight")

    def quantize(self, weight: Array) -> Mapping[str, Array]:
        self._trouble.work("quantising a weight")
        largest = np.abs(weight).max(axis=1, keepdims=True, initial=0)
        if not np.isfinite(largest).all():
            raise ValueError("a weight that is not finite")
        scales = self._scales(largest)
        return {VALUES: np.rint(weight / scales).astype(np.int8), SCALE: scales}

    def _scales(self, largest: Array) -> Array:
        """The lowest power of two that is at least ``largest`` / 127; 1 for zeros."""
        fraction, exponent = np.frexp(largest / np.float32(LARGEST["int8"]))
        scales: Array = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
        return scales
