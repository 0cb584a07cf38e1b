"""Model directories that the suites run on."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from headrace.testing.tensors import read_tensors, write_tensors
from headrace_torch.training import TorchTrainingEngine

CHARACTERS = "0123456789abcdefghijklmnopqrstuvwxyz=+-*/ ()."


@pytest.fixture(scope="session")
def character_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A tiny torch model with a tokenizer of characters."""
    path = Path(tmp_path_factory.mktemp("model"))
    settings = {
        "architecture": "llama",
        "alphabet": CHARACTERS,
        "hidden_size": 32,
        "layers": 2,
        "heads": 4,
        "kv_heads": 2,
        "intermediate_size": 48,
        "max_length": 256,
    }
    TorchTrainingEngine.create_model(str(path), settings=settings, seed=7)
    return str(path)


@pytest.fixture(scope="session")
def sharp_model(character_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with matrices so large that its distributions are far from uniform."""
    path = Path(tmp_path_factory.mktemp("sharp")) / "model"
    shutil.copytree(character_model, path)
    write_tensors(
        path / "model.safetensors",
        {name: 8 * tensor if tensor.ndim == 2 else tensor for name, tensor in read_tensors(path).items()},
    )
    return str(path)
