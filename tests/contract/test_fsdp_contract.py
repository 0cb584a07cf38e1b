"""The engine of several ranks keeps the rules of a training engine, alone and with another rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from headrace.contract import TrainingEngine
from headrace.testing.suites import TrainingEngineContract
from headrace_fsdp.training import FsdpTrainingEngine


class TestOneRank(TrainingEngineContract):
    ranks = 1

    @pytest.fixture
    def plugin(self) -> TrainingEngine:
        return FsdpTrainingEngine(FsdpTrainingEngine.Settings(learning_rate=1e-3, ranks=self.ranks, rank_deadline=60))

    @pytest.fixture
    def model_path(self, sharp_model: str) -> str:
        return sharp_model

    @pytest.fixture
    def scratch(self, scratch_table: Mapping[str, Any]) -> Mapping[str, Any]:
        return scratch_table


@pytest.mark.engine
class TestTwoRanks(TestOneRank):
    """Needs nothing but time: every rule starts processes."""

    ranks = 2
