"""Products in bfloat16, on processors with and without such arithmetic."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional as F

from headrace_torch import products


@pytest.fixture(params=[True, False], ids=["emulated", "native"])
def emulated(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setattr(products, "emulates_bfloat16", lambda: request.param)
    return bool(request.param)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_product_is_the_same_to_rounding_whoever_computes_it(emulated: bool, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(shape, generator=generator).to(dtype) for shape in ((5, 64), (32, 64), (32,)))
    for given in (None, bias):
        found = products.linear(x, products.factor(weight), given)
        exact = F.linear(x.double(), weight.double(), None if given is None else given.double())
        assert found.dtype == dtype
        assert torch.allclose(found.double(), exact, rtol=2**-7 if dtype == torch.bfloat16 else 1e-5, atol=1e-2)


@pytest.mark.usefixtures("emulated")
def test_gradients_come_in_the_dtype_of_what_they_are_of() -> None:
    x = torch.ones(3, 8, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.full((4, 8), 2.0, dtype=torch.bfloat16, requires_grad=True)
    products.linear(x, weight).float().sum().backward()
    assert x.grad is not None
    assert weight.grad is not None
    assert (x.grad.dtype, x.grad.unique().tolist()) == (torch.bfloat16, [8.0])
    assert (weight.grad.dtype, weight.grad.unique().tolist()) == (torch.bfloat16, [3.0])


def test_weights_are_kept_in_float32_only_where_bfloat16_is_emulated(emulated: bool) -> None:
    weight = torch.ones(2, 2, dtype=torch.bfloat16)
    assert products.factor(weight).dtype == (torch.float32 if emulated else torch.bfloat16)
    assert products.factor(weight.float()).dtype == torch.float32
