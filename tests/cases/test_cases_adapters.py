"""Adapters that come and go while answers are generated.

Case G07.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import Array
from headrace.contract.adapters import adapter_names
from headrace.errors import EngineError
from headrace.testing.suites.serving import Served, request, serving
from headrace.testing.tensors import read_tensors
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.training import TorchTrainingEngine

SCRATCH = {
    "architecture": "llama",
    "alphabet": "0123456789=",
    "hidden_size": 32,
    "layers": 1,
    "heads": 2,
    "intermediate_size": 48,
    "max_length": 128,
}
PROMPT = np.array([3, 5, 7], dtype=np.int32)


@pytest.fixture
def model(tmp_path: Path) -> str:
    TorchTrainingEngine.create_model(str(tmp_path), settings=SCRATCH, seed=1)
    return str(tmp_path)


@pytest.fixture
async def served(model: str) -> AsyncIterator[Served]:
    engine = TorchInferenceEngine(TorchInferenceSettings(live_versions=6))
    async with serving(engine, model, deadline=60) as running:
        yield running


def adapted(model: str, version: int) -> dict[str, Array]:
    """The model's tensors and an adapter for one layer, another for each version."""
    generator, tensors = np.random.default_rng(version), read_tensors(model)
    name = "model.layers.0.mlp.up_proj.weight"
    outputs, inputs = tensors[name].shape
    a, b = adapter_names(name)
    return {
        **tensors,
        a: generator.standard_normal((4, inputs), dtype=np.float32),
        b: generator.standard_normal((outputs, 4), dtype=np.float32),
    }


async def test_G07_an_adapter_stays_until_the_last_request_on_it_has_ended(served: Served, model: str) -> None:
    await served.push(adapted(model, 1), 1)
    (expected,) = await served.generate(request("alone", PROMPT, version=1, seed=4, max_new_tokens=100))
    await served.engine.submit([request("long", PROMPT, version=1, seed=4, max_new_tokens=100, stream=True)])
    await served.next_outputs("the first token")
    for version in (2, 3, 4):
        await served.push(adapted(model, version), version)
        with pytest.raises(EngineError, match="version 1 cannot be retired: 1 of its requests are open"):
            await served.engine.retire(1)
    (found,) = await served.finish(["long"])
    assert found.tokens == expected.tokens
    assert found.logprobs == pytest.approx(expected.logprobs, abs=1e-5)
    await served.engine.retire(1)
    assert (await served.engine.health()).versions == (0, 2, 3, 4)


async def test_G07_a_request_names_its_adapter_by_its_version_and_no_base_answers_instead(
    served: Served, model: str
) -> None:
    await served.push(adapted(model, 1), 1)
    await served.engine.retire(0)
    with pytest.raises(EngineError, match=r"asks for version 0; live are \[1\]"):
        await served.engine.submit([request("on the base", PROMPT, version=0)])
    with pytest.raises(EngineError, match=r"asks for version 2; live are \[1\]"):
        await served.engine.submit([request("too early", PROMPT, version=2)])
