"""Low-bit layers: the numbers they give, the gradients that go through them, and how weights are kept apart."""

from __future__ import annotations

import copy
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.contract import Array, Quantization
from headrace.contract.quantization import dequantize
from headrace_quantization.schemes import W4A8, Fp8E4M3, W4A16Int4, W8A8Int8
from headrace_torch.low_bit import kernels
from headrace_torch.low_bit.straight_through import straight_through
from headrace_torch.low_bit.weight import LowBitWeight, low_bit_weight

SCHEMES = {
    "w8a8_int8": W8A8Int8(W8A8Int8.Settings()),
    "w4a16_int4": W4A16Int4(W4A16Int4.Settings(group=32)),
    "w4a16_int4 in odd groups": W4A16Int4(W4A16Int4.Settings(group=20)),
    "w4a8": W4A8(W4A8.Settings(group=32)),
    "fp8_e4m3": Fp8E4M3(Fp8E4M3.Settings()),
    "fp8_e4m3 in squares": Fp8E4M3(Fp8E4M3.Settings(blocks="square")),
}
WAYS = [way for way in (*kernels._WAYS, kernels._floating) if way is kernels._floating or kernels._is_exact(way)]


@pytest.fixture(params=SCHEMES.values(), ids=SCHEMES.keys())
def scheme(request: pytest.FixtureRequest) -> Quantization:
    found: Quantization = request.param
    return found


def drawn(*shape: int, seed: int = 0, size: float = 1.0) -> Tensor:
    return size * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def held(scheme: Quantization, weight: Tensor) -> LowBitWeight:
    parts = scheme.quantize(weight.numpy())
    return low_bit_weight(parts, scheme.format, columns=weight.shape[1], device="cpu")


def rounded_inputs(x: Array, kind: str | None) -> Array:
    """float64; by the formulae of MECHANISMS, in numpy."""
    if kind is None:
        return x.astype(np.float64)
    largest = {"int8": 127.0, "float8_e4m3fn": 448.0}[kind]
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(largest)
    if kind == "int8":
        return np.rint(x / scale).astype(np.float64) * scale
    return (x / scale).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale


def reference(scheme: Quantization, weight: Tensor, x: Tensor) -> Array:
    """x̂ ŵᵀ, float64."""
    parts, fmt = scheme.quantize(weight.numpy()), scheme.format
    meaning = dequantize(parts, fmt, shape=tuple(weight.shape)).astype(np.float64)
    product: Array = rounded_inputs(x.numpy(), fmt.activations) @ meaning.T
    return product


@pytest.mark.parametrize("shape", [(64, 96), (96, 1024), (10, 20), (130, 257)])
def test_a_product_is_that_of_rounded_inputs_by_dequantised_weights(
    scheme: Quantization, shape: tuple[int, int]
) -> None:
    weight, x = drawn(*shape, size=0.02), drawn(7, shape[1], seed=1)
    found = held(scheme, weight).product(x)
    assert found.dtype == torch.float32
    np.testing.assert_allclose(found.numpy(), reference(scheme, weight, x), rtol=1e-5, atol=1e-5)


def extremes(rows: int, inputs: int) -> tuple[Tensor, Tensor]:
    """Weights [96, ``inputs``] and inputs [rows, ``inputs``] at random, among which are the largest."""
    generator = torch.Generator().manual_seed(rows)
    values = torch.randint(-127, 128, (96, inputs), generator=generator, dtype=torch.int8)
    x = torch.randint(-127, 128, (rows, inputs), generator=generator, dtype=torch.int8)
    x[0], values[0], values[1] = 127, 127, -127
    return values, x


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("rows", [1, 2, 7, 65])
def test_sums_of_integers_are_exact_however_many_tokens_there_are(way: Any, rows: int) -> None:
    values, x = extremes(rows, 2**24 // (127 * kernels._FACTORS.get(way, 127)))
    assert torch.equal(way(values)(x).double(), x.double() @ values.double().T)


@pytest.mark.parametrize("rows", [1, 65])
@pytest.mark.parametrize("inputs", [500, 1040])
def test_the_kernel_that_is_chosen_for_weights_is_exact_for_all_of_their_sums(rows: int, inputs: int) -> None:
    """Of 1,040 inputs a kernel that shifts them would round on the way: one in hundreds of sums is off by one."""
    values, x = extremes(rows, inputs)
    assert torch.equal(kernels.int8_product(values)(x).double(), x.double() @ values.double().T)


@pytest.mark.skipif([kernels._floating] == WAYS, reason="this build of torch has no oneDNN kernel for int8")
def test_sums_beyond_what_float32_has_are_the_same_alone_and_among_others() -> None:
    values, x = extremes(65, 5000)
    product = kernels.int8_product(values)
    together = product(x)
    assert all(torch.equal(product(x[i : i + 1])[0], together[i]) for i in range(65))
    torch.testing.assert_close(together.double(), x.double() @ values.double().T, rtol=1e-6, atol=8)


def test_a_kernel_that_loses_what_is_above_16_bits_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN does with unsigned bytes above 127, on a processor without VNNI."""

    def saturating(values: Tensor) -> kernels.Product:
        weight = values.int()

        def product(x: Tensor) -> Tensor:
            pairs = (x.int()[:, None, :] * weight).unflatten(-1, (-1, 2)).sum(-1)
            return pairs.clamp(-(2**15) + 1, 2**14).sum(-1).float()

        return product

    monkeypatch.setattr(kernels, "_WAYS", (saturating,))
    values, x = torch.full((32, 64), 127, dtype=torch.int8), torch.full((1, 64), 127, dtype=torch.int8)
    assert saturating(values)(x)[0, 0] < 127 * 127 * 64
    assert kernels.int8_product(values)(x)[0, 0] == 127 * 127 * 64


def test_a_token_alone_gets_the_numbers_that_it_gets_among_others() -> None:
    low_bit, x = held(SCHEMES["w8a8_int8"], drawn(96, 200)), drawn(50, 200, seed=1)
    together = low_bit.product(x)
    assert all(torch.equal(low_bit.product(x[i : i + 1])[0], together[i]) for i in range(50))


def test_a_token_of_zeros_gives_zeros(scheme: Quantization) -> None:
    x = drawn(3, 64)
    x[1] = 0
    found = held(scheme, drawn(32, 64)).product(x)
    assert not found[1].any()
    assert torch.isfinite(found).all()


def test_a_token_that_is_not_finite_stays_so(scheme: Quantization) -> None:
    """Or a model that has diverged would go on unseen."""
    x = drawn(3, 64)
    x[1, 5] = float("nan")
    found = held(scheme, drawn(32, 64)).product(x)
    assert torch.isnan(found[1]).all()
    assert torch.isfinite(found[[0, 2]]).all()


@pytest.mark.parametrize("name", ["w8a8_int8", "fp8_e4m3", "fp8_e4m3 in squares"])
def test_a_product_in_bfloat16_is_rounded_once(name: str) -> None:
    low_bit, x = held(SCHEMES[name], drawn(32, 64)), drawn(3, 64, seed=1).bfloat16()
    assert torch.equal(low_bit.product(x), low_bit.product(x.float()).bfloat16())


@pytest.mark.parametrize("name", [name for name in SCHEMES if "w4" in name])
@pytest.mark.parametrize("tokens", [1, 8, 9, 64])
def test_a_product_of_four_bits_in_bfloat16_is_as_exact_as_one_of_bfloat16_weights(name: str, tokens: int) -> None:
    weight, x = drawn(64, 256), drawn(tokens, 256, seed=1).bfloat16()
    low_bit = held(SCHEMES[name], weight)
    found, right = low_bit.product(x), low_bit.inputs(x) @ low_bit.numbers.T
    assert found.dtype == torch.bfloat16
    within = 2**-8 * (low_bit.inputs(x).abs() @ low_bit.numbers.abs().T) ** 0.5 + 2**-8 * right.abs()
    assert ((found.float() - right).abs() <= 3 * within).all()


@pytest.mark.parametrize("name", ["w4a16_int4", "w4a8"])
def test_a_token_alone_gets_about_what_it_gets_among_many_in_bfloat16(name: str) -> None:
    """Alone by the packed kernel, among many by dequantised weights."""
    low_bit, x = held(SCHEMES[name], drawn(64, 256)), drawn(50, 256, seed=1).bfloat16()
    together = low_bit.product(x).float()
    alone = torch.cat([low_bit.product(x[i : i + 1]) for i in range(50)]).float()
    assert (alone - together).norm() <= 2**-8 * together.norm()


def test_joined_weights_give_what_each_gives_side_by_side(scheme: Quantization) -> None:
    parts = [held(scheme, drawn(rows, 96, seed=rows)) for rows in (64, 32, 160)]
    x = drawn(5, 96, seed=9)
    found = LowBitWeight.joined(parts).product(x)
    torch.testing.assert_close(found, torch.cat([part.product(x) for part in parts], 1), rtol=1e-6, atol=1e-5)


def test_QRL_3_the_gradient_of_a_weight_is_that_of_what_it_stands_for(scheme: Quantization) -> None:
    weight, x, g = drawn(32, 64, size=0.1), drawn(5, 64, seed=1), drawn(5, 32, seed=2)
    low_bit = held(scheme, weight)
    meaning = low_bit.numbers.clone().requires_grad_()
    inputs = low_bit.inputs(x).clone().requires_grad_()
    (inputs @ meaning.T).backward(g)
    weight.requires_grad_()
    x.requires_grad_()
    straight_through(x, weight, low_bit).backward(g)
    assert weight.grad is not None
    assert x.grad is not None
    torch.testing.assert_close(weight.grad, meaning.grad)
    torch.testing.assert_close(x.grad, inputs.grad)


def test_a_narrow_model_gets_narrow_gradients(scheme: Quantization) -> None:
    weight, x = drawn(32, 64).bfloat16().requires_grad_(), drawn(5, 64).bfloat16().requires_grad_()
    straight_through(x, weight, held(scheme, weight.detach().float())).sum().backward()
    assert (weight.grad.dtype, x.grad.dtype) == (torch.bfloat16, torch.bfloat16)  # type: ignore[union-attr]


def test_gradients_in_bfloat16_are_those_of_float32_but_for_its_rounding(scheme: Quantization) -> None:
    weight, x, g = drawn(32, 64, size=0.1), drawn(50, 64, seed=1).bfloat16(), drawn(50, 32, seed=2).bfloat16()
    low_bit, found = held(scheme, weight), []
    for dtype in (torch.bfloat16, torch.float32):
        leaves = [tensor.to(dtype, copy=True).requires_grad_() for tensor in (weight, x)]
        straight_through(leaves[1], leaves[0], low_bit).backward(g.to(dtype))
        found.append([leaf.grad.float() for leaf in leaves if leaf.grad is not None])
    for narrow, wide in zip(*found, strict=True):
        assert (narrow - wide).norm() <= 2**-7 * wide.norm()


def test_QRL_3_steps_below_one_of_the_grid_add_up_in_the_weight(scheme: Quantization) -> None:
    """A learner that kept its weights low-bit would lose most of them."""
    weight = drawn(32, 64, size=0.1)
    small = weight.abs() < 0.05  # so that no scale moves
    before = held(scheme, weight).values.float()

    def changed(steps: int) -> float:
        moved = held(scheme, torch.where(small, weight * (1 + 0.01 * steps), weight)).values.float()
        return float((moved != before)[small].float().mean())

    assert changed(1) < 0.2
    assert changed(20) > max(0.1, 4 * changed(1))


def test_copies_of_a_model_share_low_bit_weights() -> None:
    low_bit = held(SCHEMES["w8a8_int8"], drawn(8, 8))
    assert copy.deepcopy([low_bit])[0] is low_bit


def test_four_bit_weights_take_four_bits_each_where_there_is_a_kernel() -> None:
    values = torch.randint(-7, 8, (64, 128), dtype=torch.int8)
    product = kernels.int4_product(values, torch.ones(64, 4), group=32)
    if product is None:
        pytest.skip("this build of torch has no kernel for packed int4")
    (packed,) = (c.cell_contents for c in product.__closure__ or () if getattr(c.cell_contents, "ndim", 0) == 2)
    assert packed.nbytes == 64 * 128 // 2


@pytest.mark.parametrize(("outputs", "inputs", "group"), [(64, 128, 16), (64, 100, 32), (40, 128, 32)])
def test_shapes_that_the_packed_kernel_does_not_know_are_left_to_floats(outputs: int, inputs: int, group: int) -> None:
    values = torch.ones(outputs, inputs, dtype=torch.int8)
    assert kernels.int4_product(values, torch.ones(outputs, -(-inputs // group)), group=group) is None
