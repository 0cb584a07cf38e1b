"""The built-in schemes: golden vectors, error bounds, and what is kept as it is."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from headrace.contract import Array, LowBitFormat, Quantization
from headrace.contract.quantization import (
    LARGEST,
    dequantize,
    float8,
    pack_int4,
    per_weight,
    quantized,
    unpack_int4,
)
from headrace.errors import ContractError
from headrace.registry import load
from headrace_quantization.absmax import quantize_blocks
from headrace_quantization.schemes import W4A8, Fp8E4M3, W4A16Int4, W8A8Int8

SCHEMES = [
    W8A8Int8(W8A8Int8.Settings()),
    W4A16Int4(W4A16Int4.Settings(group=4)),
    W4A8(W4A8.Settings(group=32)),
    Fp8E4M3(Fp8E4M3.Settings()),
    Fp8E4M3(Fp8E4M3.Settings(blocks="square")),
]
FORMATS = [
    LowBitFormat(weights=kind, block=block)
    for kind in ("int8", "int4", "float8_e4m3fn")
    for block in ((1, 0), (1, 4), (3, 2), (0, 0), (128, 128))
]
WEIGHTS = arrays.arrays(
    np.float32,
    arrays.array_shapes(min_dims=2, max_dims=2, max_side=9),
    elements=st.floats(-(2.0**99), 2.0**99, width=32),
)


def row(*values: float) -> Array:
    return np.array([values], np.float32)


def test_four_bits_of_one_group_are_those_of_the_paper() -> None:
    """Half steps go to the even neighbour: -3.5 to -4."""
    parts = SCHEMES[1].quantize(row(0.7, -0.35, 0.12, 0.0))
    assert parts["weight_scale"].tolist() == [[np.float32(0.1)]]
    assert unpack_int4(parts["weight_packed"], columns=4).tolist() == [[7, -4, 1, 0]]
    meaning = dequantize(parts, SCHEMES[1].format, shape=(1, 4))
    assert meaning == pytest.approx(row(0.7, -0.4, 0.1, 0.0), abs=1e-7)


def test_int8_has_a_scale_for_each_output() -> None:
    parts = SCHEMES[0].quantize(np.array([[1.27, -0.005, 0.634], [-254.0, 2.0, 3.1]], np.float32))
    assert parts["weight_scale"] == pytest.approx(np.array([[0.01], [2.0]]))
    assert parts["weight"].tolist() == [[127, 0, 63], [-127, 1, 2]]


def test_eight_bit_floats_reach_448_and_have_three_bits_of_fraction() -> None:
    parts = SCHEMES[3].quantize(row(448.0, -17.0, 18.0, 1.0625, 2.0**-9, 2.0**-11))
    assert parts["weight_scale"].tolist() == [[1.0]]
    assert parts["weight"].astype(np.float32).tolist() == [[448.0, -16.0, 18.0, 1.0, 2.0**-9, 0.0]]


def test_square_blocks_have_a_scale_each_and_may_be_cut_off_at_the_edges() -> None:
    weight = np.ones((130, 200), np.float32)
    weight[:128, 128:] = 2.0
    weight[128:, :128] = 4.0
    scales = SCHEMES[4].quantize(weight)["weight_scale"]
    assert scales == pytest.approx(np.array([[1, 2], [4, 1]]) / 448)


def test_eight_values_are_in_a_word_the_first_lowest() -> None:
    packed = pack_int4(np.array([[-7, -1, 0, 1, 2, 3, 4, 7, 5]], np.int8))
    assert packed.view(np.uint32).tolist() == [[0xFCBA9871, 0x8888888D]]


@given(arrays.arrays(np.int8, arrays.array_shapes(min_dims=2, max_dims=2, max_side=20), elements=st.integers(-8, 7)))
def test_packing_loses_nothing(values: Array) -> None:
    assert np.array_equal(unpack_int4(pack_int4(values), columns=values.shape[1]), values)


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@given(weight=WEIGHTS)
def test_QRL_2_what_is_quantised_again_is_the_same(fmt: LowBitFormat, weight: Array) -> None:
    once = quantize_blocks(weight, fmt)
    again = quantize_blocks(dequantize(once, fmt, shape=weight.shape), fmt)
    assert {k: v.tobytes() for k, v in once.items()} == {k: v.tobytes() for k, v in again.items()}


@pytest.mark.parametrize("fmt", FORMATS, ids=str)
@given(weight=WEIGHTS)
def test_QRL_2_an_error_is_at_most_half_a_step_of_the_grid(fmt: LowBitFormat, weight: Array) -> None:
    parts = quantize_blocks(weight, fmt)
    scale = per_weight(parts["weight_scale"], fmt, shape=weight.shape).astype(np.float64)
    error = np.abs(dequantize(parts, fmt, shape=weight.shape).astype(np.float64) - weight)
    step = scale
    if fmt.weights == "float8_e4m3fn":
        exponent = np.floor(np.log2(np.maximum(np.abs(weight) / scale, 2.0**-6) * (1 + 1e-6)))
        step = scale * np.exp2(exponent - 3)
    assert (error <= step / 2 * (1 + 1e-4)).all()


@given(st.floats(-2000, 2000, width=32))
def test_eight_bit_floats_are_rounded_to_the_nearest_that_there_is(value: float) -> None:
    grid = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    grid = grid[np.isfinite(grid)]
    found = float(float8(np.array([value], np.float32)).astype(np.float32)[0])
    assert abs(found - value) == np.abs(grid - np.float32(value)).min()


@given(st.floats(0, 2.0**126, width=32))
def test_no_weight_is_clamped(largest: float) -> None:
    """So that a straight-through gradient need not decide what becomes of those."""
    assume(largest > 1e-30)
    for kind in LARGEST:
        fmt = LowBitFormat(weights=kind, block=(1, 0))
        parts = quantize_blocks(row(largest), fmt)
        assert float(np.float32(largest) / parts["weight_scale"][0, 0]) <= LARGEST[kind] * (1 + 1e-6)


@pytest.mark.parametrize(
    ("name", "shape", "low"),
    [
        ("model.layers.3.self_attn.q_proj.weight", (64, 64), True),
        ("model.layers.3.mlp.gate_proj.weight", (64, 64), True),
        ("model.layers.3.self_attn.q_proj.bias", (64,), False),
        ("model.layers.3.input_layernorm.weight", (64,), False),
        ("model.layers.3.mlp.gate.weight", (8, 64), False),
        ("model.embed_tokens.weight", (512, 64), False),
        ("lm_head.weight", (512, 64), False),
    ],
)
def test_embedding_head_norms_and_routers_stay_as_they_are(name: str, shape: tuple[int, ...], low: bool) -> None:
    assert [scheme.covers(name, shape=shape) for scheme in SCHEMES] == [low] * len(SCHEMES)


def test_a_job_may_keep_other_modules() -> None:
    scheme = W8A8Int8(W8A8Int8.Settings(keep=("down_proj",)))
    assert not scheme.covers("model.layers.0.mlp.down_proj.weight", shape=(8, 8))
    assert scheme.covers("lm_head.weight", shape=(8, 8))


def test_a_group_has_at_least_one_input() -> None:
    with pytest.raises(ValueError, match="group must be at least 1, got 0"):
        W4A16Int4.Settings(group=0)


@pytest.mark.parametrize("name", ["w8a8_int8", "w4a16_int4", "w4a8", "fp8_e4m3"])
def test_schemes_are_found_by_name(name: str) -> None:
    assert issubclass(load("quantization", name), Quantization)


class Stale(W8A8Int8):
    """Takes the scales of the first weight that it sees for all others."""

    scales: Array | None = None

    def quantize(self, weight: Array) -> dict[str, Array]:
        parts: dict[str, Any] = super().quantize(weight)
        if self.scales is None:
            self.scales = parts["weight_scale"]
        return {
            "weight": np.clip(np.rint(weight / self.scales), -127, 127).astype(np.int8),
            "weight_scale": self.scales,
        }


def test_parts_have_full_names_and_are_refused_when_they_stand_for_something_else() -> None:
    weight = np.random.default_rng(0).normal(0, 0.02, (32, 64)).astype(np.float32)
    scheme = Stale(W8A8Int8.Settings())
    assert sorted(quantized(scheme, "up.weight", weight)) == ["up.weight", "up.weight_scale"]
    with pytest.raises(ContractError, match=r"up\.weight was quantised with a relative error of 0\.\d+; int8 has at"):
        quantized(scheme, "up.weight", 3 * weight)


def test_parts_of_another_format_are_refused() -> None:
    class Wide(W8A8Int8):
        def quantize(self, weight: Array) -> dict[str, Array]:
            return {**super().quantize(weight), "weight_scale": np.ones((1, 1), np.float32)}

    with pytest.raises(ContractError, match=r"up\.weight was quantised to .*; its format has .*\(32, 1\)"):
        quantized(Wide(W8A8Int8.Settings()), "up.weight", np.ones((32, 64), np.float32))
