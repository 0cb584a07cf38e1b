"""A tiny model for Megatron's ranks."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.fsdp import write_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Of the Qwen3 family, untied."""
    return write_model(Path(tmp_path_factory.mktemp("megatron")) / "model")
