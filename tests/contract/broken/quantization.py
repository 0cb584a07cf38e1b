"""Quantisation schemes that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest

from headrace.contract import Array, Quantization
from headrace.contract.quantization import SCALE, VALUES
from headrace.testing import FakeQuantization
from headrace.testing.suites import QuantizationContract


class Broken(QuantizationContract):
    """Subclasses say which scheme."""

    Kind: type[FakeQuantization]

    @pytest.fixture
    def plugin(self) -> Quantization:
        return self.Kind(FakeQuantization.Settings())


class TestGivesWideScales(Broken):
    breaks = "test_the_parts_are_those_of_the_format"

    class Kind(FakeQuantization):
        def quantize(self, weight: Array) -> Mapping[str, Array]:
            parts = super().quantize(weight)
            return {**parts, SCALE: parts[SCALE].astype(np.float64)}


class TestHasFewSteps(Broken):
    breaks = "test_what_the_parts_stand_for_is_near_the_weight"

    class Kind(FakeQuantization):
        def quantize(self, weight: Array) -> Mapping[str, Array]:
            parts = super().quantize(weight)
            return {**parts, VALUES: np.where(np.abs(parts[VALUES]) < 64, 0, parts[VALUES]).astype(np.int8)}


class TestLosesTheLargest(Broken):
    breaks = "test_quantising_again_changes_nothing"

    class Kind(FakeQuantization):
        def quantize(self, weight: Array) -> Mapping[str, Array]:
            parts = super().quantize(weight)
            values = parts[VALUES]
            largest = np.abs(values) == np.abs(values).max(axis=1, keepdims=True)
            return {**parts, VALUES: values - np.sign(values) * largest}


class TestRemembersTheLargest(Broken):
    breaks = "test_the_same_weight_becomes_the_same_bytes"

    class Kind(FakeQuantization):
        seen = 0.0

        def _scales(self, largest: Array) -> Array:
            self.seen = max(self.seen, float(largest.max(initial=0)))
            return super()._scales(largest) * (2 if self.seen > 500 else 1)


class TestHasAZeroPoint(Broken):
    breaks = "test_zeros_stay_zeros"

    class Kind(FakeQuantization):
        def quantize(self, weight: Array) -> Mapping[str, Array]:
            parts = dict(super().quantize(weight))
            dead = ~parts[VALUES].any(axis=1)
            parts[VALUES][dead] = 64
            return parts


class TestWritesInfinityAsZero(Broken):
    breaks = "test_a_weight_that_is_not_finite_is_refused"

    class Kind(FakeQuantization):
        def quantize(self, weight: Array) -> Mapping[str, Array]:
            return super().quantize(np.nan_to_num(weight, posinf=0, neginf=0))


class TestCoversVectors(Broken):
    breaks = "test_only_matrices_are_covered"

    class Kind(FakeQuantization):
        def covers(self, name: str, *, shape: tuple[int, ...]) -> bool:
            return name.endswith("_proj.weight")
