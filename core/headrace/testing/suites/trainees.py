"""Drives a training engine for its suite: small batches in, steps and weights out."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from headrace.contract import CURRENT, Array, Batch, LossSpec, Ragged, StepResult, TrainingContext, TrainingEngine
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS

LIKELIHOOD = LossSpec(function="headrace.testing.losses:weighted_likelihood")
VALUED = LossSpec(function="headrace.testing.losses:valued_likelihood", values=True)
LENGTHS = (3, 9, 5, 17, 2, 12)
"""Of the six rows of :meth:`Trainee.batch`."""


class Trainee:
    """A started engine."""

    def __init__(self, engine: TrainingEngine, model_path: str) -> None:
        self.engine = engine
        config = json.loads((Path(model_path) / "config.json").read_text())
        self.vocabulary: int = config["vocab_size"]

    def tokens(self, count: int, *, seed: int = 0) -> list[int]:
        """``count`` token ids, the same every time."""
        found: list[int] = np.random.default_rng(seed).integers(0, self.vocabulary, count).tolist()
        return found

    def batch(self, *, seed: int = 0) -> Batch:
        """Six rows of different lengths; their first token is the prompt."""
        return rows_of([self.tokens(length, seed=100 * seed + n) for n, length in enumerate(LENGTHS)], prompt=1)

    def train(self, *parts: Batch, loss: LossSpec = LIKELIHOOD, denominator: float = 32.0) -> StepResult:
        """One optimiser step over these micro-batches."""
        step = self.engine.begin_step(loss)
        for part in parts:
            step.accumulate(part)
        return step.finish(denominator=denominator)

    def values(self, *, weights: str = CURRENT) -> Ragged:
        """The critic's, of :meth:`batch`."""
        return self.engine.forward(self.batch(), outputs=("values",), weights=weights)["values"]

    def weights(self) -> dict[str, Array]:
        """Copies of the current weights."""
        return {name: np.array(tensor) for name, tensor in self.engine.weight_source().tensors()}


@contextmanager
def training(engine: TrainingEngine, model_path: str, *, values: bool = False) -> Iterator[Trainee]:
    """``engine`` started on the model, with a critic for ``values``, and closed at the end."""
    engine.start(
        TrainingContext(name="trainer", model_path=model_path, seed=5, threads=1, total_steps=100, values=values)
    )
    try:
        yield Trainee(engine, model_path)
    finally:
        engine.close()


def rows_of(tokens: Sequence[Sequence[int]], *, prompt: int) -> Batch:
    """Rows whose tokens after the first ``prompt`` are trained, with weight 1."""
    ids = Ragged.from_arrays([np.array(row, dtype=np.int32) for row in tokens], dtype=np.int32)
    mask = Ragged.from_arrays([np.arange(len(row)) >= prompt for row in tokens], dtype=np.bool_)
    return Batch(
        rows=np.arange(len(tokens)),
        columns={TOKENS: ids, LOSS_MASK: mask, LOSS_WEIGHTS: mask.like(mask.values.astype(np.float32))},
    )
