"""Rows of a batch as flat arrays: which tokens are trained, which rows belong together.

Invariant: masking is selection. A value outside the mask is never read into arithmetic, so a NaN there
can reach nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from headrace.contract import Array, Batch, Ragged
from headrace.contract.columns import GROUP, LOSS_MASK, TOKEN_VERSIONS
from headrace.errors import ContractError

TRAJECTORY = "trajectory"
"""Dense int64, optional: id of the row's trajectory; without it every row is a trajectory of its own."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Groups:
    """Which rows belong together. ``index``: int64 [n], group of each row, 0 to ``count`` - 1. ``order``: int64
    [n], rows by (group, row id): sums taken in this order do not depend on the order of the batch."""

    index: Array
    count: int
    order: Array


def groups_of(batch: Batch) -> Groups:
    """The groups of ``batch``."""
    ids, index = np.unique(batch.dense(GROUP), return_inverse=True)
    return Groups(index=index, count=len(ids), order=np.lexsort((batch.rows, index)))


def first_rows(batch: Batch) -> Array:
    """bool [n]: one row per trajectory, the one with the lowest id."""
    first = np.ones(len(batch), dtype=np.bool_)
    if TRAJECTORY in batch.columns:
        order = np.argsort(batch.rows, kind="stable")
        _, positions = np.unique(batch.dense(TRAJECTORY)[order], return_index=True)
        first[:] = False
        first[order[positions]] = True
    return first


def trajectories_of(batch: Batch) -> tuple[Array, int]:
    """int64 [n], trajectory of each row, 0 to count - 1; and the count."""
    if TRAJECTORY not in batch.columns:
        return np.arange(len(batch)), len(batch)
    ids, index = np.unique(batch.dense(TRAJECTORY), return_inverse=True)
    return index, len(ids)


def trainable(batch: Batch, *, keep: Array) -> Ragged:
    """The final mask, bool per token: ``loss_mask`` within the rows of ``keep`` (bool [n]). Numerators and
    denominators both come from it. ContractError when ``loss_mask`` marks a row's first token."""
    mask = batch.ragged(LOSS_MASK)
    starts = mask.offsets[:-1][mask.lengths > 0]
    if np.any(mask.values[starts]):
        row = int(batch.rows[mask.lengths > 0][np.flatnonzero(mask.values[starts])[0]])
        raise ContractError(
            f"row {row} trains its first token, whose log-probability is not defined",
            fix="the environment's loss_mask must be False at position 0: an episode starts with a prompt",
        )
    return mask.like(mask.values.astype(np.bool_) & np.repeat(keep, mask.lengths))


def count_true(mask: Ragged) -> Array:
    """int64 [n]: True values per row."""
    running = np.concatenate(([0], np.cumsum(mask.values, dtype=np.int64)))
    return running[mask.offsets[1:]] - running[mask.offsets[:-1]]


def sampled_tokens(batch: Batch) -> Array:
    """int64 [n]: tokens of each row that the policy sampled, also those that ``loss_mask`` leaves out because another
    version sampled them."""
    return count_true(sampled(batch))


def sampled(batch: Batch) -> Ragged:
    """bool per token: the policy sampled it, of whatever version."""
    if TOKEN_VERSIONS not in batch.columns:
        return batch.ragged(LOSS_MASK)
    versions = batch.ragged(TOKEN_VERSIONS)
    return versions.like(versions.values >= 0)


def per_token(mask: Ragged, values: Array) -> Ragged:
    """float32 per token: the row's entry of ``values`` (float64 [n]) where ``mask`` is True, 0 elsewhere."""
    return mask.like(np.where(mask.values, np.repeat(values, mask.lengths), 0.0).astype(np.float32))


def spread(mask: Ragged, values: Array) -> Ragged:
    """float32 per token: ``values`` (float64 [N]), one for each token where ``mask`` is True, 0 elsewhere."""
    column = np.zeros(len(mask.values), dtype=np.float32)
    column[mask.values] = values
    return mask.like(column)
