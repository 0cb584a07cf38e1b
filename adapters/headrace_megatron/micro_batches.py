"""A share's rows in the form in which Megatron computes them: padded micro-batches, each of rows of one length.

A row is computed up to its last predicting token, and padded on its right, where causal attention cannot see it.
Invariant: the padded length of a row depends on that row alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS, Array, Batch, Ragged
from headrace_torch.trainer.packing import Plan, make_plan, padded_length


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class MicroBatch:
    """b rows of L tokens, of which T are trained."""

    batch: Batch
    """The rows."""
    rows: Array
    """Which of the share's they are."""
    plan: Plan
    """Where the trained tokens are in ``batch``."""
    tokens: Tensor
    """int64 [b, L]."""
    positions: Tensor
    """int64 [b, L]."""
    predicting: Tensor
    """int64 [T]: index into the flattened ``tokens`` of what predicts each trained one."""
    targets: Tensor
    """int64 [T]: ids of the trained tokens."""

    def to(self, device: str) -> MicroBatch:
        """With its tensors there."""
        moved = {name: getattr(self, name).to(device) for name in ("tokens", "positions", "predicting", "targets")}
        return MicroBatch(batch=self.batch, rows=self.rows, plan=self.plan, **moved)


def micro_batches(batch: Batch, *, vocabulary: int, pieces: int) -> list[MicroBatch]:
    """Of the rows that train a token. ``pieces``: of which the share makes so many at least, where it has the rows, to
    fill a pipeline. ContractError as of :func:`make_plan`."""
    plan = make_plan(batch, vocabulary=vocabulary)
    if plan is None:
        return []
    starts = batch.ragged(TOKENS).offsets[:-1]
    lengths = np.zeros(len(batch), dtype=np.int64)
    np.maximum.at(lengths, plan.sequence, plan.trainable - starts[plan.sequence])
    return [_made(batch, rows, lengths[rows], vocabulary) for rows in _grouped(lengths, pieces)]


def idle_micro_batch() -> MicroBatch:
    """What a rank without rows computes, for the others' sake."""
    tokens = Ragged.from_arrays([np.zeros(2, dtype=np.int32)])
    mask = tokens.like(np.array([False, True]))
    weights = tokens.like(np.zeros(2, dtype=np.float32))
    columns = {TOKENS: tokens, LOSS_MASK: mask, LOSS_WEIGHTS: weights}
    return micro_batches(Batch(rows=np.zeros(1, dtype=np.int64), columns=columns), vocabulary=1, pieces=1)[0]


def _grouped(lengths: Array, pieces: int) -> Iterator[Array]:
    """Rows of one padded length each, none of more than its share of the tokens."""
    needed = np.flatnonzero(lengths)
    padded = padded_length(lengths[needed])
    most = -(-int(padded.sum()) // pieces)
    for length in np.unique(padded):
        rows = needed[padded == length]
        count = max(1, most // int(length))
        yield from (rows[start : start + count] for start in range(0, len(rows), count))


def _made(batch: Batch, rows: Array, lengths: Array, vocabulary: int) -> MicroBatch:
    some = batch.take(rows)
    plan = make_plan(some, vocabulary=vocabulary)
    assert plan is not None
    tokens = some.ragged(TOKENS)
    width = int(padded_length(lengths)[0])
    columns = np.arange(width)
    inside = columns < lengths[:, None]
    starts = tokens.offsets[:-1]
    grid = np.where(inside, tokens.values[np.where(inside, starts[:, None] + columns, 0)], 0)
    predicting = plan.sequence * width + plan.trainable - 1 - starts[plan.sequence]
    return MicroBatch(
        batch=some,
        rows=rows,
        plan=plan,
        tokens=torch.from_numpy(grid.astype(np.int64)),
        positions=torch.arange(width).expand(len(rows), width),
        predicting=torch.from_numpy(predicting.astype(np.int64)),
        targets=torch.from_numpy(plan.targets),
    )
