"""Every training engine keeps the rules of its role."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from headrace.contract import TrainingEngine
from headrace.testing import FakeTrainingEngine
from headrace.testing.suites import TrainingEngineContract
from headrace_torch.training import LoraSettings, TorchTrainingEngine


class TestTorchTrainingEngine(TrainingEngineContract):
    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        return TorchTrainingEngine(TorchTrainingEngine.Settings(learning_rate=1e-3))

    @pytest.fixture
    def model_path(self, sharp_model: str) -> str:
        return sharp_model

    @pytest.fixture
    def scratch(self, scratch_table: Mapping[str, Any]) -> Mapping[str, Any]:
        return scratch_table


class TestTorchTrainingEngineWithAnAdapter(TestTorchTrainingEngine):
    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        return TorchTrainingEngine(TorchTrainingEngine.Settings(learning_rate=1e-3, lora=LoraSettings(rank=2)))


class TestFakeTrainingEngine(TrainingEngineContract):
    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        return FakeTrainingEngine(FakeTrainingEngine.Settings())

    @pytest.fixture
    def model_path(self, tmp_path: Path) -> str:
        FakeTrainingEngine.create_model(str(tmp_path / "model"), settings={}, seed=3)
        return str(tmp_path / "model")

    @pytest.fixture
    def scratch(self) -> Mapping[str, Any]:
        return {"vocabulary": 8}
