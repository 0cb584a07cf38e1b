"""What lets Megatron-Core 0.19 compute on CPUs: in its modules, and nowhere else, the name ``torch`` means a stand-in.

Megatron asks for the current CUDA device, streams and generators wherever it runs. The stand-in is torch but for those,
which are the CPU's. Nothing of torch itself is changed: other libraries, and tensors, stay what they are. Invariant:
where torch sees a GPU, nothing is installed.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch

CPU = torch.device("cpu")
_LATE = (
    "dist_checkpointing.strategies.async_utils",
    "dist_checkpointing.strategies.filesystem_async",
    "dist_checkpointing.strategies.fully_parallel",
    "dist_checkpointing.strategies.state_dict_saver",
    "dist_checkpointing.strategies.torch",
    "transformer.moe.moe_layer",
)
"""Modules that Megatron imports when they are needed; they must have the stand-in too."""
_FACTORIES = (
    "arange",
    "empty",
    "empty_like",
    "full",
    "ones",
    "ones_like",
    "rand",
    "randn",
    "tensor",
    "zeros",
    "zeros_like",
)
_CLASS_NAMES = ("BFloat16Tensor", "FloatTensor", "HalfTensor")
"""Of what ``Tensor.type()`` says, which Megatron's optimizer compares with the names of those on a GPU."""


class _Nothing:
    """A stream or event: whatever is asked of it is done."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        """Takes whatever a stream takes."""

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return lambda *arguments, **options: self


class _StandIn(types.ModuleType):
    """A module with other values for some of its names."""

    def __init__(self, module: types.ModuleType, others: Mapping[str, Any]) -> None:
        super().__init__(module.__name__)
        self.__dict__["_module"] = module
        self.__dict__.update(others)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def install() -> None:
    """Give what is imported of Megatron-Core the stand-in, where there is no GPU. Twice is fine."""
    if torch.cuda.is_available():
        return
    for name in _LATE:
        importlib.import_module(f"megatron.core.{name}")
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "megatron" and getattr(module, "torch", None) is torch:
            module.torch = _torch()  # type: ignore[attr-defined]  # it has one
    _generators()
    _optimizer()
    _dispatcher()


@functools.cache
def _torch() -> types.ModuleType:
    cuda = {
        "current_device": lambda: CPU,
        "current_stream": _Nothing,
        "empty_cache": _nothing,
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "is_current_stream_capturing": lambda: False,
        "manual_seed": torch.manual_seed,
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": _nothing,
        "Event": _Nothing,
        "Stream": _Nothing,
    }
    factories = {name: _on_cpu(getattr(torch, name)) for name in _FACTORIES}
    return _StandIn(torch, {"cuda": _StandIn(torch.cuda, cuda), **factories})


def _nothing(*arguments: Any, **options: Any) -> None:
    """There is nothing to wait for or to free."""


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def made(*arguments: Any, **options: Any) -> Any:
        if torch.device(options.get("device") or CPU).type == "cuda":
            options["device"] = CPU
        return factory(*arguments, **options)

    return made


def _generators() -> None:
    """Megatron reads and sets a GPU's generator by functions of its own."""
    random = importlib.import_module("megatron.core.tensor_parallel.random")
    random._get_cuda_rng_state = lambda *arguments, **options: torch.get_rng_state()  # type: ignore[attr-defined]
    random._set_cuda_rng_state = lambda state, *arguments, **options: torch.set_rng_state(state)  # type: ignore[attr-defined]


def _optimizer() -> None:
    """Have the distributed optimizer know a CPU's tensors: the names it compares with are constants of its code."""
    kind = importlib.import_module("megatron.core.optimizer.distrib_optimizer").DistributedOptimizer
    for method in (kind.__init__, kind._build_model_and_main_param_groups.__func__):
        method.__code__ = method.__code__.replace(co_consts=tuple(map(_of_cpu, method.__code__.co_consts)))


def _of_cpu(constant: Any) -> Any:
    if isinstance(constant, tuple):
        return tuple(map(_of_cpu, constant))
    names = {f"torch.cuda.{name}": f"torch.{name}" for name in _CLASS_NAMES}
    return names.get(constant, constant) if isinstance(constant, str) else constant


def _dispatcher() -> None:
    """Experts are sent numbers of tokens; Megatron makes numbers of a tensor only when it is a GPU's."""
    module = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")

    def numbers(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.tolist() if as_numpy and isinstance(tensor, torch.Tensor) else tensor

    module.maybe_move_tensor_to_cpu = numbers  # type: ignore[attr-defined]
