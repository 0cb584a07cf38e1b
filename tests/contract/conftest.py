"""Model directories that the suites run on."""

from __future__ import annotations

from pathlib import Path

import pytest

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
