"""Log-probs or values of rows under weights that are not being trained: one forward pass for many rows.

The bits of a row's numbers depend on which rows share its pass. Invariant: in lockstep a group shares passes with
itself alone, so that it does not matter whether the trainer computes them, or a stage that takes groups as they come.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.contract import Array, Batch, ForwardOutput, Ragged, TrainingEngine
from headrace.contract.columns import GROUP, TOKENS
from headrace.flow.batching import micro_batches


def group_passes(batch: Batch, wanted: Array, *, token_budget: int) -> Iterator[Array]:
    """Positions of the rows of each pass, for every group of which a row is ``wanted`` (bool [n]): all of its rows, in
    the order of their ids."""
    groups, lengths = batch.dense(GROUP), batch.ragged(TOKENS).lengths
    for group in np.unique(groups[wanted]):
        rows = np.flatnonzero(groups == group)
        yield from micro_batches(lengths, token_budget=token_budget, rows=rows[np.argsort(batch.rows[rows])])


def row_passes(batch: Batch, wanted: Array, *, token_budget: int) -> Iterator[Array]:
    """Positions of the rows of each pass: those ``wanted`` (bool [n]), in the order of the batch."""
    lengths = batch.ragged(TOKENS).lengths
    yield from micro_batches(lengths, token_budget=token_budget, rows=np.flatnonzero(wanted))


def scored(
    engine: TrainingEngine,
    batch: Batch,
    passes: Iterator[Array],
    *,
    weights: str,
    temperature: float,
    output: ForwardOutput = "logprobs",
) -> Ragged:
    """float32 per token; 0 for rows of no pass. ``weights``: "current", or the name of a snapshot."""
    tokens = batch.ragged(TOKENS)
    values = np.zeros(len(tokens.values), dtype=np.float32)
    for rows in passes:
        found = engine.forward(batch.take(rows), outputs=(output,), weights=weights, temperature=temperature)
        for row, row_values in zip(rows, found[output], strict=True):
            values[tokens.offsets[row] : tokens.offsets[row + 1]] = row_values
    return tokens.like(values)
