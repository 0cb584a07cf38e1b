"""Stands in for sgl_kernel, whose wheels have kernels for GPUs alone. SGLang imports it on a CPU too, where it computes
with torch; of all its functions one is called there, and the others say that they are not.

It is a module and no package: SGLang takes the absence of ``sgl_kernel.scalar_type`` for what it is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__version__ = "0.4.10"


def copy_all_layer_kv_cache_cpu(
    keys: list[torch.Tensor], values: list[torch.Tensor], source: torch.Tensor, destination: torch.Tensor
) -> None:
    """In every layer, copy what lies at the slots ``source`` to the slots ``destination``; both int64 [N]."""
    for layer in (*keys, *values):
        layer[destination] = layer[source]


def __getattr__(name: str) -> Callable[..., Any]:
    if name.startswith("__"):
        raise AttributeError(name)

    def absent(*_: Any, **__: Any) -> None:
        raise NotImplementedError(f"sgl_kernel.{name} is a kernel for GPUs, and this environment of SGLang is for CPUs")

    return absent


class _NoRuntime:
    """SGLang registers host memory with CUDA where it returns routed experts, also without CUDA."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *_, **__: 0


torch.cuda.cudart = _NoRuntime  # there is none to replace: see server.py for when
