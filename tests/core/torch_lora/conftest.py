"""Small models, and trainers of adapters for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from headrace.contract import TrainingContext
from headrace.testing.tensors import read_tensors, write_tensors
from headrace_torch.training import LoraSettings, TorchTrainingEngine, TorchTrainingSettings
from support.lora import LORA, SCRATCH


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """The directory of a model of an architecture, whose distributions are far from uniform."""
    made: dict[str, str] = {}

    def model(architecture: str = "llama") -> str:
        if architecture not in made:
            path = tmp_path_factory.mktemp("model")
            TorchTrainingEngine.create_model(str(path), settings={**SCRATCH, "architecture": architecture}, seed=7)
            tensors = {name: 6 * t if t.ndim == 2 else t for name, t in read_tensors(path).items()}
            write_tensors(path / "model.safetensors", tensors)
            made[architecture] = str(path)
        return made[architecture]

    return model


@pytest.fixture
def model(models: Callable[..., str]) -> str:
    return models()


@pytest.fixture
def trainer(model: str) -> Iterator[Callable[..., TorchTrainingEngine]]:
    """A started training engine, closed at the end."""
    started: list[TorchTrainingEngine] = []

    def start(
        lora: LoraSettings | None = LORA, *, path: str = model, values: bool = False, **settings: Any
    ) -> TorchTrainingEngine:
        engine = TorchTrainingEngine(TorchTrainingSettings(**{"learning_rate": 1e-2, "lora": lora, **settings}))
        engine.start(TrainingContext(name="trainer", model_path=path, seed=5, threads=1, total_steps=10, values=values))
        started.append(engine)
        return engine

    yield start
    for each in started:
        each.close()
