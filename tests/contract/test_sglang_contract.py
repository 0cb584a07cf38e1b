"""SGLang keeps the rules of its role. Run by ``make test-engines``, in its own environment.

All tests attach to one server, which takes half a minute to start; instances that start their own are tested in
``tests/engines/sglang``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from headrace.contract import InferenceEngine
from headrace.testing.suites import InferenceEngineContract
from headrace_sglang.attaching import KEY_VARIABLE
from headrace_sglang.inference import SglangInferenceEngine
from headrace_torch.training import TorchTrainingEngine
from support.sglang_served import SLOTS, running_server
from support.sharp_model import sharpen

# The first test waits for the server; warnings of what runs it are not ours.
pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="session")
def sglang_model(scratch_table: Mapping[str, Any], tmp_path_factory: pytest.TempPathFactory) -> str:
    path = str(tmp_path_factory.mktemp("model"))
    TorchTrainingEngine.create_model(path, settings=scratch_table, seed=7)
    return sharpen(path, tmp_path_factory.mktemp("sharp"), factor=4.0)


@pytest.fixture(scope="session")
def address(sglang_model: str) -> Iterator[str]:
    with running_server(sglang_model) as server, pytest.MonkeyPatch.context() as patch:
        patch.setenv(KEY_VARIABLE, server.key)
        yield server.address


class TestSglangInferenceEngine(InferenceEngineContract):
    @pytest.fixture
    def plugin(self, address: str) -> InferenceEngine:
        return SglangInferenceEngine(SglangInferenceEngine.Settings(slots=SLOTS, address=address))

    @pytest.fixture
    def model_path(self, sglang_model: str) -> str:
        return sglang_model
