"""What an algorithm adds to rows, as the columns of the contract, wherever it is asked: in the trainer or apart."""

from __future__ import annotations

import numpy as np

from headrace.contract import Algorithm, Batch, Column, Metric, Ragged
from headrace.contract.columns import ADVANTAGES, DENOMINATOR, LOSS_WEIGHTS, TRAINED


def prepared(algorithm: Algorithm, batch: Batch) -> tuple[dict[str, Column], dict[str, Metric]]:
    """The columns it adds to whole groups, ``trained`` among them, and its metrics."""
    found = algorithm.prepare(batch)
    columns = {
        **found.columns,
        LOSS_WEIGHTS: _float32(found.columns[LOSS_WEIGHTS]),
        DENOMINATOR: np.asarray(found.columns[DENOMINATOR], dtype=np.float64),
        TRAINED: np.asarray(found.trained, dtype=bool),
    }
    if ADVANTAGES in columns:
        columns[ADVANTAGES] = _float32(columns[ADVANTAGES])
    return columns, dict(found.metrics)


def _float32(column: Column) -> Column:
    if isinstance(column, Ragged):
        return column.like(column.values.astype(np.float32, copy=False))
    return np.asarray(column, dtype=np.float32)
