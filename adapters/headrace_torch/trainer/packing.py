"""Which tokens a training forward computes, and where each result goes.

Rows that begin alike share the computation of their common beginning: a hidden state depends on nothing but the tokens
up to its position, so the prompt of a group is computed once for all its members, and the gradients of all members meet
there. What follows a row's last trainable token is not computed at all.

Invariant: a *node* is one distinct prefix; every plan covers each needed prefix exactly once, and the padded length of
a row depends on that row alone, so that a neighbour's content cannot change how a row is computed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.contract.columns import LOSS_MASK, TOKENS, Array, Batch
from headrace.errors import ContractError

_LENGTH_STEP = 8
"""Short rows are padded to a multiple of this, long ones to the next eighth of a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Bucket:
    """Rows of one padded length. ``nodes``: int64 [b, L], the node at each row's positions; beyond a row's end its
    first node is repeated, where causal attention cannot see it."""

    nodes: Array


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Plan:
    """U nodes to compute for T trainable tokens, whose log-probs come from P predicting nodes."""

    tokens: Array
    """int64 [U]."""
    positions: Array
    """int64 [U]."""
    buckets: tuple[Bucket, ...]
    attended: Array
    """int64 [U]: where each node's attention output lies in the concatenated, flattened buckets."""
    predicting: Array
    """int64 [P], ascending: nodes that predict a trainable token."""
    predictor: Array
    """int64 [T]: index into ``predicting`` for each trainable token."""
    targets: Array
    """int64 [T]: ids of the trainable tokens."""
    trainable: Array
    """int64 [T]: positions of the trainable tokens in the flat ``tokens`` column."""
    sequence: Array
    """int64 [T]: row of each trainable token."""


def make_plan(batch: Batch, *, vocabulary: int) -> Plan | None:
    """The plan for a batch with columns ``tokens`` and ``loss_mask``; None without a trainable token.

    ContractError when a token id is not below ``vocabulary``, or the mask is not aligned with the tokens or trains a
    position 0.
    """
    tokens, mask = batch.ragged(TOKENS), batch.ragged(LOSS_MASK)
    if not np.array_equal(tokens.offsets, mask.offsets):
        raise ContractError(f"column {LOSS_MASK!r} is not aligned with {TOKENS!r}")
    _require_known(batch, vocabulary)
    trainable = np.flatnonzero(mask.values)
    if len(trainable) == 0:
        return None
    starts = tokens.offsets[:-1]
    sequence = np.searchsorted(tokens.offsets, trainable, side="right") - 1
    if np.any(trainable == starts[sequence]):
        row = int(batch.rows[sequence[np.argmax(trainable == starts[sequence])]])
        raise ContractError(f"row {row} trains its first token, which nothing predicts")
    predicting_position = trainable - 1 - starts[sequence]
    lengths = np.zeros(len(tokens), dtype=np.int64)
    np.maximum.at(lengths, sequence, predicting_position + 1)
    needed = np.flatnonzero(lengths)
    grid = _token_grid(tokens.values, starts[needed], lengths[needed])
    nodes = _nodes(grid)
    inside = np.flatnonzero(nodes.ravel() >= 0)
    entries = nodes.ravel()[inside]
    count = int(entries.max()) + 1
    node_tokens, node_positions = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.int64)
    node_tokens[entries] = grid.ravel()[inside]
    node_positions[entries] = inside % nodes.shape[1]
    buckets, attended = _buckets(nodes, lengths[needed], count)
    grid_row = np.cumsum(lengths > 0) - 1
    predicting, predictor = np.unique(nodes[grid_row[sequence], predicting_position], return_inverse=True)
    return Plan(
        tokens=node_tokens,
        positions=node_positions,
        buckets=buckets,
        attended=attended,
        predicting=predicting,
        predictor=predictor,
        targets=tokens.values[trainable].astype(np.int64),
        trainable=trainable,
        sequence=sequence,
    )


def split_rows(batch: Batch, *, tokens: int) -> Iterator[Array]:
    """Consecutive row indices of at most ``tokens`` tokens together, or a single longer row."""
    ends = batch.ragged(TOKENS).offsets[1:]
    start, used = 0, 0
    while start < len(batch):
        stop = max(int(np.searchsorted(ends, used + tokens, side="right")), start + 1)
        yield np.arange(start, stop)
        start, used = stop, int(ends[stop - 1])


def _require_known(batch: Batch, vocabulary: int) -> None:
    tokens = batch.ragged(TOKENS)
    unknown = np.flatnonzero((tokens.values < 0) | (tokens.values >= vocabulary))
    if len(unknown):
        row = int(batch.rows[np.searchsorted(tokens.offsets, unknown[0], side="right") - 1])
        raise ContractError(
            f"row {row} has token id {tokens.values[unknown[0]]}; the model's ids are 0 to {vocabulary - 1}",
            fix="let rollout and environment use the tokenizer of the model that is trained",
        )


def _token_grid(values: Array, starts: Array, lengths: Array) -> Array:
    """int32 [n, max length], -1 beyond each row's end."""
    columns = np.arange(lengths.max())
    inside = columns < lengths[:, None]
    index = np.where(inside, starts[:, None] + columns, 0)
    return np.where(inside, values[index], -1).astype(np.int32)


def _nodes(grid: Array) -> Array:
    """int64, shaped as the grid: the node of every entry, -1 beyond a row's end.

    In an order that sorts rows by content, rows with a common prefix are neighbours: an entry is a new node where the
    row differs, here or earlier, from the row above, and else the node of the nearest row above with a new one. Nodes
    are numbered by first appearance in the batch's own order, which sharing therefore does not disturb.
    """
    rows, width = grid.shape
    order = np.argsort(grid.view(f"V{grid.itemsize * width}").ravel(), kind="stable")
    ordered = grid[order]
    new = np.ones(grid.shape, dtype=bool)
    new[1:] = np.logical_or.accumulate(ordered[1:] != ordered[:-1], axis=1)
    owner = np.empty(grid.shape, dtype=np.int64)
    owner[order] = np.maximum.accumulate(np.where(new, np.arange(rows)[:, None], 0), axis=0)
    inside = grid >= 0
    prefixes = (owner * width + np.arange(width))[inside]
    _, first, prefix = np.unique(prefixes, return_index=True, return_inverse=True)
    rank = np.empty(len(first), dtype=np.int64)
    rank[np.argsort(first)] = np.arange(len(first))
    nodes = np.full(grid.shape, -1, dtype=np.int64)
    nodes[inside] = rank[prefix]
    return nodes


def _buckets(nodes: Array, lengths: Array, count: int) -> tuple[tuple[Bucket, ...], Array]:
    """Rows by padded length, and the place of each node's output in the concatenation of the buckets."""
    padded = padded_length(lengths)
    attended = np.empty(count, dtype=np.int64)
    buckets = []
    offset = 0
    for length in np.unique(padded):
        rows = np.flatnonzero(padded == length)
        chosen = np.full((len(rows), length), -1, dtype=np.int64)
        width = min(int(length), nodes.shape[1])
        chosen[:, :width] = nodes[rows, :width]
        place = np.flatnonzero(chosen.ravel() >= 0)
        attended[chosen.ravel()[place]] = place + offset
        buckets.append(Bucket(nodes=np.where(chosen >= 0, chosen, chosen[:, :1])))
        offset += chosen.size
    return tuple(buckets), attended


def padded_length(lengths: Array) -> Array:
    """To which rows of these lengths, at least 1, are padded."""
    eighth = 2.0 ** (np.ceil(np.log2(lengths)) - 3)
    step = np.maximum(eighth, _LENGTH_STEP).astype(np.int64)
    return -(-lengths // step) * step
