"""vLLM keeps the rules of its role. Run by ``make test-engines``, in its own environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.contract import InferenceEngine
from headrace.testing.suites import InferenceEngineContract
from headrace_torch.training import TorchTrainingEngine
from headrace_vllm.inference import VllmInferenceEngine
from support.sharp_model import sharpen

# Warnings of vLLM and what it imports are not ours.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session")
def vllm_model(scratch_table: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model, with heads as large as vLLM needs them on a CPU: of 32 numbers at least."""
    path = str(tmp_path_factory.mktemp("model"))
    TorchTrainingEngine.create_model(path, settings={**scratch_table, "hidden_size": 128}, seed=7)
    return sharpen(path, tmp_path_factory.mktemp("sharp"), factor=4.0)


class TestVllmInferenceEngine(InferenceEngineContract):
    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return VllmInferenceEngine(VllmInferenceEngine.Settings(slots=4, kv_bytes=64 << 20))

    @pytest.fixture
    def model_path(self, vllm_model: str) -> str:
        return vllm_model
