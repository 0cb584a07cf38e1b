"""A model whose distributions are far from uniform, as those of trained ones are."""

from __future__ import annotations

import shutil
from pathlib import Path

from headrace.testing.tensors import read_tensors, write_tensors


def sharpen(model: str, folder: Path, *, factor: float = 8.0) -> str:
    """A copy of ``model`` in ``folder``, its matrices ``factor`` times as large."""
    path = folder / "model"
    shutil.copytree(model, path)
    write_tensors(
        path / "model.safetensors",
        {name: factor * tensor if tensor.ndim == 2 else tensor for name, tensor in read_tensors(path).items()},
    )
    return str(path)
