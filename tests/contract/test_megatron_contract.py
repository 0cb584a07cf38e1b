"""Megatron's ranks keep the rules of a training engine. Run by ``make test-engines``, in its own environment."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from headrace.contract import TrainingEngine
from headrace.testing.suites import TrainingEngineContract
from headrace_megatron.training import MegatronTrainingEngine

# Warnings of Megatron and what it imports are not ours.
pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]


class TestOneRank(TrainingEngineContract):
    layout: ClassVar[dict[str, int]] = {}

    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        return MegatronTrainingEngine(
            MegatronTrainingEngine.Settings(learning_rate=1e-3, rank_deadline=90, **self.layout)
        )

    @pytest.fixture
    def model_path(self, sharp_model: str) -> str:
        return sharp_model

    @pytest.fixture
    def scratch(self, scratch_table: Mapping[str, Any]) -> Mapping[str, Any]:
        return scratch_table


class TestTensorParallel(TestOneRank):
    layout: ClassVar[dict[str, int]] = {"tensor_parallel": 2}


class TestDataParallel(TestOneRank):
    layout: ClassVar[dict[str, int]] = {"data_parallel": 2}
