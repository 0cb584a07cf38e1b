"""What an algorithm adds to rows, as the columns of the contract, wherever it is asked: in the trainer or apart."""

from __future__ import annotations

import numpy as np

from headrace.contract import Algorithm, Array, Batch, Column, Metric, Ragged
from headrace.contract.columns import (
    ADVANTAGES,
    DENOMINATOR,
    GREEDY,
    GREEDY_REWARD,
    GROUP,
    LOSS_WEIGHTS,
    REWARD,
    TOKENS,
    TRAINED,
)
from headrace.errors import ContractError


def prepared(algorithm: Algorithm, batch: Batch) -> tuple[dict[str, Column], dict[str, Metric]]:
    """The columns it adds to whole groups, ``trained`` among them, and its metrics. Of greedy answers, where there are
    any, it is given the rewards alone, and they get 0 of everything. ContractError for a row that would be trained and
    divided by nothing."""
    if GREEDY not in batch.columns:
        return _prepared(algorithm, batch)
    sampled = np.flatnonzero(~batch.dense(GREEDY))
    columns, metrics = _prepared(algorithm, _beside_greedy_rewards(batch).take(sampled))
    return {name: _spread(column, sampled, batch) for name, column in columns.items()}, metrics


def _beside_greedy_rewards(batch: Batch) -> Batch:
    greedy, groups = batch.dense(GREEDY), batch.dense(GROUP)
    rewards = dict(zip(groups[greedy].tolist(), batch.dense(REWARD)[greedy].tolist(), strict=True))
    return batch.with_columns({GREEDY_REWARD: np.array([rewards[group] for group in groups.tolist()], np.float32)})


def _spread(column: Column, rows: Array, batch: Batch) -> Column:
    """A column of ``rows`` (int64, ascending) as one of the whole batch; ragged ones are aligned with its tokens."""
    tokens = batch.ragged(TOKENS)
    if not isinstance(column, Ragged):
        dense = np.zeros(len(batch), column.dtype)
        dense[rows] = column
        return dense
    chosen = np.zeros(len(batch), dtype=bool)
    chosen[rows] = True
    values = np.zeros(len(tokens.values), column.values.dtype)
    values[np.repeat(chosen, tokens.lengths)] = column.values
    return tokens.like(values)


def _prepared(algorithm: Algorithm, batch: Batch) -> tuple[dict[str, Column], dict[str, Metric]]:
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
