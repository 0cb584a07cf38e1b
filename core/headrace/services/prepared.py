"""What an algorithm adds to rows, as the columns of the contract, wherever it is asked: in the trainer or apart."""

from __future__ import annotations

import numpy as np

from headrace.contract import Algorithm, Array, Batch, Column, Metric, Ragged
from headrace.contract.columns import ADVANTAGES, DENOMINATOR, LOSS_WEIGHTS, TRAINED
from headrace.errors import ContractError


def prepared(algorithm: Algorithm, batch: Batch) -> tuple[dict[str, Column], dict[str, Metric]]:
    """The columns it adds to whole groups, ``trained`` among them, and its metrics. ContractError for a row that would
    be trained and divided by nothing."""
    found = algorithm.prepare(batch)
    weights = _float32(found.columns[LOSS_WEIGHTS])
    denominator = np.asarray(found.columns[DENOMINATOR], dtype=np.float64)
    trained = np.asarray(found.trained, dtype=bool)
    _check_denominator(algorithm, batch, trained & _weighed(weights), denominator)
    columns = {**found.columns, LOSS_WEIGHTS: weights, DENOMINATOR: denominator, TRAINED: trained}
    if ADVANTAGES in columns:
        columns[ADVANTAGES] = _float32(columns[ADVANTAGES])
    return columns, dict(found.metrics)


def _check_denominator(algorithm: Algorithm, batch: Batch, taught: Array, denominator: Array) -> None:
    """``taught``: bool [n], rows that are trained with any weight."""
    nothing = np.flatnonzero(taught & ~(denominator > 0))
    if not len(nothing):
        return
    name, first = type(algorithm).__name__, nothing[0]
    raise ContractError(
        f"{name}.prepare() trains {len(nothing)} of {len(batch)} rows that add nothing to the denominator of their "
        f"step: row {batch.rows[first]} adds {denominator[first]:g}, more than 0 was expected",
        origin=f"algorithm {name}",
        fix="give each row with a loss weight its share of the denominator, such as its number of trained tokens; the "
        "suite AlgorithmContract of headrace.testing has this rule",
    )


def _weighed(weights: Column) -> Array:
    """bool [n]: rows with any weight."""
    if not isinstance(weights, Ragged):
        return np.asarray(weights != 0)
    until = np.concatenate([[0], np.cumsum(weights.values != 0)])
    return np.diff(until[weights.offsets]) > 0


def _float32(column: Column) -> Column:
    if isinstance(column, Ragged):
        return column.like(column.values.astype(np.float32, copy=False))
    return np.asarray(column, dtype=np.float32)
