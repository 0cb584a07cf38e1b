"""Products with weights, in bfloat16 also where the processor has no such arithmetic.

There PyTorch emulates it, several times slower than float32 (5 times, of a 1024 x 576 x 1536 product on AVX2). The
same numbers come from a float32 product of the same bfloat16 factors, rounded once: that is what hardware with
bfloat16 arithmetic does, which sums in float32 too.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional as F


@cache
def emulates_bfloat16() -> bool:
    """Whether this machine's processor has no bfloat16 arithmetic. False where it is not known."""
    if platform.machine() not in ("x86_64", "AMD64") or not hasattr(torch.cpu, "get_capabilities"):
        return False
    capabilities = torch.cpu.get_capabilities()
    return not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def computed_in(x: Tensor) -> torch.dtype:
    """What products of ``x`` are computed in: its own dtype, where the processor has arithmetic for it."""
    emulated = x.dtype == torch.bfloat16 and x.device.type == "cpu" and emulates_bfloat16()
    return torch.float32 if emulated else x.dtype


def factor(weight: Tensor) -> Tensor:
    """``weight`` as :func:`linear` multiplies it: kept that way, it is not converted anew for every product."""
    return weight.to(computed_in(weight))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` in the dtype of ``x``; ``weight`` may be a :func:`factor`."""
    weight = factor(weight)
    if weight.dtype == x.dtype:
        return F.linear(x, weight, bias)
    return F.linear(x.to(weight.dtype), weight, None if bias is None else bias.to(weight.dtype)).to(x.dtype)
