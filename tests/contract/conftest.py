"""Model directories that the suites run on, and how long they wait for a broken fake."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace_torch.training import TorchTrainingEngine
from support.sharp_model import sharpen

SCRATCH = {
    "architecture": "llama",
    "alphabet": "0123456789abcdefghijklmnopqrstuvwxyz=+-*/ ().",
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 48,
    "max_length": 256,
}


@pytest.fixture(scope="session")
def scratch_table() -> Mapping[str, Any]:
    """``[model.scratch]`` of a tiny torch model."""
    return SCRATCH


@pytest.fixture(scope="session")
def character_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """That model, with a tokenizer of characters."""
    path = str(tmp_path_factory.mktemp("model"))
    TorchTrainingEngine.create_model(path, settings=SCRATCH, seed=7)
    return path


@pytest.fixture(scope="session")
def sharp_model(character_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model with matrices so large that its distributions are far from uniform."""
    return sharpen(character_model, tmp_path_factory.mktemp("sharp"))


@pytest.fixture(autouse=True)
def _impatience(request: pytest.FixtureRequest) -> None:
    """The one test that a broken fake must fail may wait in vain, so not for long; others have their suite's time."""
    if request.node.name == getattr(request.cls, "breaks", None):
        request.instance.deadline = 1.0
