"""Stands in for torchvision, whose builds for GPUs do not load beside a torch for CPUs. SGLang imports it at its start,
for images; whatever is used of it here says that it is not there.
"""

from __future__ import annotations

import enum
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

__version__ = "0.0.0"
__path__: list[str] = []


class InterpolationMode(enum.Enum):
    """Read when SGLang is imported."""

    NEAREST = "nearest"
    NEAREST_EXACT = "nearest-exact"
    BILINEAR = "bilinear"
    BICUBIC = "bicubic"
    BOX = "box"
    HAMMING = "hamming"
    LANCZOS = "lanczos"


class _Absent:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("this environment of SGLang is for text: it has no torchvision")


class _Submodule(ModuleType):
    InterpolationMode = InterpolationMode

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (_Absent,), {})


class _Submodules(MetaPathFinder, Loader):
    """Every ``torchvision.…`` is there, and empty."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.startswith(f"{__name__}.") else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _Submodule(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """Nothing in it."""


sys.meta_path.append(_Submodules())
