"""Every algorithm keeps the rules of its role."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.contract import Algorithm, Array
from headrace.testing import FakeAlgorithm
from headrace.testing.suites import AlgorithmContract
from headrace_algorithms.grpo import Grpo
from headrace_algorithms.ppo import Ppo
from headrace_algorithms.supervised import Supervised
from headrace_algorithms.variants import (
    Cispo,
    Dapo,
    DrGrpo,
    Gspo,
    Longcat,
    MaxRl,
    ReinforcePlusPlus,
    ReinforcePlusPlusBaseline,
    Remax,
    Rloo,
    Sapo,
    Tbpo,
)

SETTINGS: list[dict[str, Any]] = [
    {},
    {"loss": "decoupled"},
    {"loss": "importance", "kl_coefficient": 0.1},
    {"aggregation": "constant", "constant_length": 8.0, "mask_truncated": True},
    {"credit": "turn"},
]


class TestGrpo(AlgorithmContract):
    @pytest.fixture(params=SETTINGS, ids=str)
    def plugin(self, request: pytest.FixtureRequest) -> Algorithm:
        return Grpo(Grpo.Settings(**request.param))

    @pytest.fixture
    def tensor(self) -> Callable[[Array], Any]:
        return torch.from_numpy


class TestPpo(AlgorithmContract):
    @pytest.fixture(params=[{}, {"whitening": "none", "trace_decay": 0.9, "kl_coefficient": 0.1}], ids=str)
    def plugin(self, request: pytest.FixtureRequest) -> Algorithm:
        return Ppo(Ppo.Settings(**request.param))

    @pytest.fixture
    def tensor(self) -> Callable[[Array], Any]:
        return torch.from_numpy


class TestVariants(AlgorithmContract):
    @pytest.fixture(
        params=[
            (DrGrpo, {"constant_length": 8.0}),
            (Dapo, {}),
            (Rloo, {}),
            (Remax, {}),
            (ReinforcePlusPlus, {}),
            (ReinforcePlusPlusBaseline, {}),
            (MaxRl, {}),
            (Cispo, {}),
            (Sapo, {}),
            (Gspo, {}),
            (Longcat, {"constant_length": 8.0}),
            (Tbpo, {}),
        ],
        ids=lambda variant: variant[0].__name__,
    )
    def plugin(self, request: pytest.FixtureRequest) -> Algorithm:
        variant, settings = request.param
        found: Algorithm = variant(variant.Settings(**settings))
        return found

    @pytest.fixture
    def tensor(self) -> Callable[[Array], Any]:
        return torch.from_numpy


class TestSupervised(AlgorithmContract):
    @pytest.fixture
    def plugin(self) -> Algorithm:
        return Supervised(Supervised.Settings())

    @pytest.fixture
    def tensor(self) -> Callable[[Array], Any]:
        return torch.from_numpy


class TestFakeAlgorithm(AlgorithmContract):
    @pytest.fixture
    def plugin(self) -> Algorithm:
        return FakeAlgorithm(FakeAlgorithm.Settings())
