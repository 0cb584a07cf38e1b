"""Every inference engine keeps the rules of its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.contract import InferenceEngine
from headrace.testing import FakeInferenceEngine, FakeTrainingEngine
from headrace.testing.suites import InferenceEngineContract
from headrace_torch.inference import TorchInferenceEngine


class TestTorchInferenceEngine(InferenceEngineContract):
    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return TorchInferenceEngine(TorchInferenceEngine.Settings(slots=6))

    @pytest.fixture
    def model_path(self, sharp_model: str) -> str:
        return sharp_model


class TestTorchInferenceEngineOfOneVersion(InferenceEngineContract):
    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return TorchInferenceEngine(TorchInferenceEngine.Settings(slots=2, live_versions=1))

    @pytest.fixture
    def model_path(self, sharp_model: str) -> str:
        return sharp_model


class TestFakeInferenceEngine(InferenceEngineContract):
    @pytest.fixture
    def plugin(self) -> InferenceEngine:
        return FakeInferenceEngine(FakeInferenceEngine.Settings(slots=4))

    @pytest.fixture
    def model_path(self, tmp_path: Path) -> str:
        FakeTrainingEngine.create_model(str(tmp_path), settings={}, seed=3)
        return str(tmp_path)
