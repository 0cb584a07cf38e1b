"""Case D07: low-bit weights whose scales are of another version become garbage, and must not be published."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from headrace.contract import Array, WeightSource
from headrace.contract.quantization import SCALE, VALUES, dequantize, float8, per_weight, relative_error
from headrace.errors import ContractError
from headrace.services.low_bit import LowBitSource
from headrace_quantization.schemes import Fp8E4M3

NAME = "model.layers.0.mlp.up_proj.weight"
SETTINGS = Fp8E4M3.Settings(blocks="square")


class Weights(WeightSource):
    """One matrix, N(0, 0.02), times ``size``."""

    size = 1.0

    def tensors(self) -> Iterator[tuple[str, Array]]:
        drawn = np.random.default_rng(0).normal(0, 0.02, (256, 384)).astype(np.float32)
        yield NAME, drawn * np.float32(self.size)


class ScalesOnce(Fp8E4M3):
    """Keeps the scales of the first version."""

    scales: Array | None = None

    def quantize(self, weight: Array) -> dict[str, Array]:
        parts = super().quantize(weight)
        if self.scales is None:
            self.scales = parts[SCALE]
        scaled = weight / per_weight(self.scales, self.format, shape=weight.shape)
        return {VALUES: float8(scaled), SCALE: self.scales}


def error(scheme: Fp8E4M3, source: Weights) -> float:
    """Of what engines get, relative to the trainer's weights."""
    ((_, weight),) = source.tensors()
    parts = {name.removeprefix(NAME.removesuffix("weight")): a for name, a in LowBitSource(source, scheme).tensors()}
    return relative_error(dequantize(parts, scheme.format, shape=weight.shape), weight)


def test_D07_every_version_is_published_with_scales_of_its_own() -> None:
    source, scheme = Weights(), Fp8E4M3(SETTINGS)
    assert error(scheme, source) == pytest.approx(0.026, abs=0.002)
    source.size = 3.0
    assert error(scheme, source) == pytest.approx(0.026, abs=0.002)


def test_D07_weights_with_scales_of_an_earlier_version_are_not_published() -> None:
    source, scheme = Weights(), ScalesOnce(SETTINGS)
    assert error(scheme, source) == pytest.approx(0.026, abs=0.002)
    source.size = 3.0
    with pytest.raises(ContractError, match=rf"{NAME} was quantised with a relative error of 0\.2\d+") as refused:
        error(scheme, source)
    assert "compute scales anew" in refused.value.fix
