"""Every environment keeps the rules of its role."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.contract import Environment
from headrace.testing import FakeEnvironment
from headrace.testing.suites import EnvironmentContract
from headrace_environments.jsonl import Jsonl
from headrace_environments.reasoning_gym import ReasoningGym
from headrace_environments.sort_symbols import SortSymbols

EXAMPLES = Path(__file__).parents[2] / "examples"


class TestSortSymbols(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> Environment:
        return SortSymbols(SortSymbols.Settings())

    @pytest.fixture
    def model_path(self, character_model: str) -> str:
        return character_model


class TestJsonl(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> Environment:
        return Jsonl(Jsonl.Settings(path="data.jsonl", prompt="{word}=", answer="{backwards}"))

    @pytest.fixture
    def model_path(self, character_model: str) -> str:
        return character_model

    @pytest.fixture
    def directory(self) -> str:
        return str(EXAMPLES / "jsonl")


class TestReasoningGym(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> Environment:
        config = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
        return ReasoningGym(ReasoningGym.Settings(dataset="chain_sum", config=config, prompt="{metadata[expression]}="))

    @pytest.fixture
    def model_path(self, character_model: str) -> str:
        return character_model


class TestFakeEnvironment(EnvironmentContract):
    @pytest.fixture
    def plugin(self) -> Environment:
        return FakeEnvironment(FakeEnvironment.Settings(size=40))
