"""A trainer that trains an adapter: batches, steps, and what it publishes."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.contract import Array, Batch, LossInputs, LossOutput, LossSpec, Ragged, WeightSource
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS
from headrace_torch.training import LoraSettings, TorchTrainingEngine

SCRATCH = {
    "architecture": "llama",
    "alphabet": "0123456789abcdefghijklmnop=",
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 96,
    "max_length": 128,
}
LOSS = LossSpec(function=f"{__name__}:likelihood", temperature=1.0)
LORA = LoraSettings(rank=4, alpha=12.0)


def likelihood(inputs: LossInputs) -> LossOutput:
    return LossOutput(numerator=-(inputs.weights * inputs.logprobs).sum())


def rows(*, seed: int = 0, count: int = 6) -> Batch:
    generator = np.random.default_rng(seed)
    ids = Ragged.from_arrays(
        [generator.integers(3, 28, n).astype(np.int32) for n in generator.integers(8, 30, count)], dtype=np.int32
    )
    mask = Ragged.from_arrays([np.arange(len(row)) >= 1 for row in ids], dtype=np.bool_)
    weights = ids.like(mask.values.astype(np.float32))
    return Batch(rows=np.arange(count), columns={TOKENS: ids, LOSS_MASK: mask, LOSS_WEIGHTS: weights})


def train(engine: TorchTrainingEngine, *, steps: int = 1) -> None:
    for seed in range(steps):
        step = engine.begin_step(LOSS)
        step.accumulate(rows(seed=seed))
        assert step.finish(denominator=100.0).applied


def read(source: WeightSource) -> dict[str, Array]:
    return {name: np.array(tensor) for name, tensor in source.tensors()}


def scored(engine: TorchTrainingEngine, batch: Batch, **options: Any) -> Array:
    found: Array = engine.forward(batch, **options)["logprobs"].values
    return found
