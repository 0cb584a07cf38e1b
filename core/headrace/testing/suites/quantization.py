"""The rules of the ``quantization`` role.

class TestMyScheme(QuantizationContract):
    @pytest.fixture
    def plugin(self) -> Quantization:
        return MyScheme(MyScheme.Settings())
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from headrace.contract import Array, Quantization
from headrace.contract.quantization import LARGEST_ERROR, SCALE, dequantize, part_kinds, relative_error
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, raises, rule

SHAPES = ((1, 1), (3, 8), (24, 40), (130, 257), (256, 384))
"""With and without blocks and words that the last of them does not fill."""


def weights(shape: tuple[int, int], *, seed: int = 0) -> Array:
    """Normally distributed, float32; outputs of very different sizes, as those of a trained model are."""
    generator = np.random.default_rng(seed)
    drawn = generator.standard_normal(shape, dtype=np.float32)
    sizes: Array = drawn * np.exp2(generator.integers(-6, 3, (shape[0], 1))).astype(np.float32)
    return sizes


class QuantizationContract(PluginContract):
    """Subclass it and override :meth:`plugin`."""

    @pytest.fixture
    def plugin(self) -> Quantization:
        """A scheme."""
        override("plugin", "a quantisation scheme")

    @rule("Of a weight of any shape, the parts are those of the scheme's format, in its dtypes and shapes.")
    def test_the_parts_are_those_of_the_format(self, plugin: Quantization) -> None:
        for shape in SHAPES:
            found = {part: (a.dtype.name, a.shape) for part, a in plugin.quantize(weights(shape)).items()}
            expected = part_kinds(plugin.format, shape=shape)
            check(found == expected, f"a weight {list(shape)} became {found}, and the format has {expected}")

    @rule("What parts stand for is near the weight: at most LARGEST_ERROR of its norm away, whatever its size.")
    def test_what_the_parts_stand_for_is_near_the_weight(self, plugin: Quantization) -> None:
        bound = LARGEST_ERROR[plugin.format.weights]
        for size in (1.0, 3.0):
            weight = np.float32(size) * weights((256, 384))
            error = relative_error(self._meaning(plugin, weight), weight)
            check(error <= bound, f"{error:.3g} of the norm of {size:g} w away; the bound is {bound:g}")

    @rule("Quantising what parts stand for gives the same parts again, bit for bit.")
    def test_quantising_again_changes_nothing(self, plugin: Quantization) -> None:
        for shape in SHAPES:
            weight = weights(shape)
            once, again = plugin.quantize(weight), plugin.quantize(self._meaning(plugin, weight))
            check(_bytes(once) == _bytes(again), f"a weight {list(shape)} became other parts the second time")

    @rule("The same weight becomes the same bytes, whatever was quantised in between, and is itself not changed.")
    def test_the_same_weight_becomes_the_same_bytes(self, plugin: Quantization) -> None:
        weight = weights((24, 40))
        first = _bytes(plugin.quantize(weight))
        plugin.quantize(100 * weights((24, 40), seed=1))
        check(_bytes(plugin.quantize(weight)) == first, "the same weight became other bytes")
        check(np.array_equal(weight, weights((24, 40))), "the weight was changed")

    @rule("Zeros stay zeros, also where all of an output's weights are.")
    def test_zeros_stay_zeros(self, plugin: Quantization) -> None:
        weight = weights((24, 40))
        weight[5], weight[:, 7] = 0, 0
        scales = plugin.quantize(weight)[SCALE]
        check(np.isfinite(scales).all(), "a scale that is not finite")
        meaning = self._meaning(plugin, weight)
        check(not meaning[weight == 0].any(), f"zeros became up to {np.abs(meaning[weight == 0]).max():.3g}")

    @rule("A weight that is not finite is a ValueError: it has no low-bit form.")
    def test_a_weight_that_is_not_finite_is_refused(self, plugin: Quantization) -> None:
        for value in (np.nan, np.inf, -np.inf):
            weight = weights((24, 40))
            weight[3, 3] = value
            raises(ValueError, lambda weight=weight: plugin.quantize(weight))  # type: ignore[misc]  # mypy cannot infer a default's type

    @rule("Only matrices are covered: nothing else has inputs and outputs.")
    def test_only_matrices_are_covered(self, plugin: Quantization) -> None:
        shapes: tuple[tuple[int, ...], ...] = ((), (64,), (2, 64, 64))
        names = ("model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight")
        wrong = [(name, shape) for name in names for shape in shapes if plugin.covers(name, shape=shape)]
        check(not wrong, f"it covers {wrong}")

    def _meaning(self, plugin: Quantization, weight: Array) -> Array:
        return dequantize(plugin.quantize(weight), plugin.format, shape=weight.shape)


def _bytes(parts: Mapping[str, Array]) -> dict[str, bytes]:
    return {part: array.tobytes() for part, array in parts.items()}
