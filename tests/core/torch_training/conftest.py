"""Tiny models, started engines, batches, and losses a test can name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from headrace.contract import Batch, LossInputs, LossOutput, LossSpec, Ragged, TrainingContext
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS, Array
from headrace_torch.training import TorchTrainingEngine, TorchTrainingSettings

LOSSES = "losses_of_torch_training_tests"
TINY: dict[str, Any] = {
    "architecture": "llama",
    "alphabet": "0123456789abcdefghijklmnop=",
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 48,
    "max_length": 128,
}


def cross_entropy(inputs: LossInputs) -> LossOutput:
    """Minus the weighted log-likelihood; with the entropy where it is there."""
    numerator = -(inputs.weights * inputs.logprobs).sum()
    metrics: dict[str, Any] = {
        "loss/largest": (-inputs.logprobs.detach().min(), 1, "max"),
        "loss/tokens": (len(inputs.logprobs), 1, "sum"),
        "loss/mean": (-inputs.logprobs.detach().sum(), len(inputs.logprobs), "mean"),
    }
    if inputs.entropy is not None:
        numerator = numerator - 0.1 * (inputs.weights * inputs.entropy).sum()
    return LossOutput(numerator=numerator, metrics=metrics)


def valued(inputs: LossInputs) -> LossOutput:
    """Per-token losses with the values of column ``value``, and the log-prob's gradient times that value."""
    value = inputs.columns["value"]
    return LossOutput(numerator=(inputs.weights * value * (1 + inputs.logprobs - inputs.logprobs.detach())).sum())


def regressed(inputs: LossInputs) -> LossOutput:
    """The squared distance of values to column ``goal``; with log-probs, so that the policy moves too."""
    error = (inputs.values - inputs.columns["goal"]).square() - 0.1 * inputs.logprobs
    return LossOutput(numerator=(inputs.weights * error).sum())


def spread(inputs: LossInputs) -> LossOutput:
    """A loss that is not a sum."""
    return LossOutput(numerator=inputs.logprobs * inputs.weights)


def constant(inputs: LossInputs) -> LossOutput:
    """A loss that has lost its gradient."""
    return LossOutput(numerator=inputs.logprobs.detach().sum())


def bare(inputs: LossInputs) -> Tensor:
    """A loss without its wrapping."""
    total: Tensor = inputs.logprobs.sum()
    return total


def odd_metric(inputs: LossInputs) -> LossOutput:
    """A metric without its reduction."""
    return LossOutput(numerator=inputs.logprobs.sum(), metrics={"odd": (1.0, 1.0, "median")})  # type: ignore[dict-item]


def undeclared(inputs: LossInputs) -> LossOutput:
    """Reads a column that no spec declares."""
    return LossOutput(numerator=(inputs.columns["reward"] * inputs.logprobs).sum())


@pytest.fixture(autouse=True)
def _losses(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType(LOSSES)
    for function in (cross_entropy, valued, regressed, spread, constant, bare, odd_metric, undeclared):
        setattr(module, function.__name__, function)
    monkeypatch.setitem(sys.modules, LOSSES, module)


@pytest.fixture
def spec() -> Callable[..., LossSpec]:
    """A LossSpec for one of this file's losses."""

    def make(function: str = "cross_entropy", **fields: Any) -> LossSpec:
        return LossSpec(function=f"{LOSSES}:{function}", **fields)

    return make


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., str]:
    """The directory of a tiny model, made once per kind; sharp enough that log-probs differ much."""
    made: dict[str, str] = {}

    def directory(**settings: Any) -> str:
        key = repr(sorted(settings.items()))
        if key not in made:
            path = str(tmp_path_factory.mktemp("model"))
            TorchTrainingEngine.create_model(path, settings={**TINY, **settings}, seed=7)
            sharpen(path)
            made[key] = path
        return made[key]

    return directory


def sharpen(path: str) -> None:
    """Scale the matrices of the directory's model, and draw biases and norms."""
    from safetensors.torch import load_file, save_file

    file = str(Path(path) / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: 6 * t if t.ndim == 2 else t + 0.2 * torch.randn(t.shape, generator=generator)
        for name, t in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})


@pytest.fixture
def engine(model: Callable[..., str]) -> Iterator[Callable[..., TorchTrainingEngine]]:
    """A started engine; all are closed at the end."""
    started: list[TorchTrainingEngine] = []

    def start(
        path: str | None = None, *, total_steps: int = 10, values: bool = False, **settings: Any
    ) -> TorchTrainingEngine:
        settings = {"learning_rate": 1e-2, **settings}
        new = TorchTrainingEngine(TorchTrainingSettings(**settings))
        context = TrainingContext(
            name="trainer", model_path=path or model(), seed=5, threads=1, total_steps=total_steps, values=values
        )
        new.start(context)
        started.append(new)
        return new

    yield start
    for each in started:
        each.close()


@pytest.fixture
def batch() -> Callable[..., Batch]:
    """Rows of ``prompt`` untrained and then trained tokens; lengths as given, random ids, weights 1."""

    def make(lengths: Sequence[int], *, prompt: int = 1, seed: int = 0, **columns: Any) -> Batch:
        generator = np.random.default_rng(seed)
        return rows_of([generator.integers(3, 30, n) for n in lengths], prompt=prompt, **columns)

    return make


@pytest.fixture
def rows() -> Callable[..., Batch]:
    """A batch of the given token ids."""
    return rows_of


def rows_of(tokens: Sequence[Sequence[int] | Array], *, prompt: int = 1, **columns: Any) -> Batch:
    """Rows with ``prompt`` untrained tokens, and further columns by keyword."""
    ids = Ragged.from_arrays([np.asarray(row, dtype=np.int32) for row in tokens], dtype=np.int32)
    mask = Ragged.from_arrays([np.arange(len(row)) >= prompt for row in tokens], dtype=np.bool_)
    weights = mask.values.astype(np.float32)
    return Batch(
        rows=np.arange(len(tokens)), columns={TOKENS: ids, LOSS_MASK: mask, LOSS_WEIGHTS: ids.like(weights), **columns}
    )


@pytest.fixture
def weights() -> Callable[[TorchTrainingEngine], dict[str, Array]]:
    """Copies of an engine's current weights."""
    return lambda engine: {name: np.array(array) for name, array in engine.weight_source().tensors()}


@pytest.fixture
def gradient() -> Callable[..., Array]:
    """The unnormalised gradient of a step over the given micro-batches, flat; the step is discarded."""

    def of(engine: TorchTrainingEngine, loss: LossSpec, parts: Sequence[Batch]) -> Array:
        step = engine.begin_step(loss)
        for part in parts:
            step.accumulate(part)
        parameters = engine._started._updater.parameters
        flat = np.concatenate([g.numpy().ravel().astype(np.float64) for g in parameters.gradients()])
        step.discard()
        return flat

    return of


@pytest.fixture
def train() -> Callable[..., Any]:
    """One optimiser step over one micro-batch."""

    def one(engine: TorchTrainingEngine, loss: LossSpec, batch: Batch, *, denominator: float = 10.0) -> Any:
        step = engine.begin_step(loss)
        step.accumulate(batch)
        return step.finish(denominator=denominator)

    return one
