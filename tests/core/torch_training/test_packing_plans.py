"""A plan computes every needed prefix once and nothing else."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.contract import Batch, Ragged
from headrace.contract.columns import LOSS_MASK, TOKENS
from headrace.errors import ContractError
from headrace_torch.trainer.packing import make_plan, split_rows

TOKEN_ROWS = st.lists(
    st.lists(st.tuples(st.integers(0, 2), st.booleans()), min_size=1, max_size=12), min_size=0, max_size=8
)


def batch_of(rows: list[list[tuple[int, bool]]]) -> Batch:
    tokens = [np.array([t for t, _ in row], dtype=np.int32) for row in rows]
    masks = [np.array([m and i > 0 for i, (_, m) in enumerate(row)]) for row in rows]
    return Batch(
        rows=np.arange(len(rows)),
        columns={
            TOKENS: Ragged.from_arrays(tokens, dtype=np.int32),
            LOSS_MASK: Ragged.from_arrays(masks, dtype=np.bool_),
        },
    )


def needed_prefixes(batch: Batch) -> list[tuple[int, ...]]:
    """Prefixes of each row up to the token before its last trainable one, in order of first appearance."""
    found: dict[tuple[int, ...], None] = {}
    for tokens, mask in zip(batch.ragged(TOKENS), batch.ragged(LOSS_MASK), strict=True):
        last = int(np.flatnonzero(mask)[-1]) if mask.any() else 0
        for stop in range(1, last + 1):
            found.setdefault(tuple(tokens[:stop].tolist()))
    return list(found)


@settings(max_examples=40)
@given(TOKEN_ROWS)
def test_every_needed_prefix_is_computed_once_in_order_of_first_appearance(rows: list[list[tuple[int, bool]]]) -> None:
    batch = batch_of(rows)
    plan, prefixes = make_plan(batch, vocabulary=3), needed_prefixes(batch)
    if plan is None:
        assert prefixes == []
        return
    assert plan.tokens.tolist() == [prefix[-1] for prefix in prefixes]
    assert plan.positions.tolist() == [len(prefix) - 1 for prefix in prefixes]


@settings(max_examples=40)
@given(TOKEN_ROWS)
def test_each_node_attends_to_its_own_prefix(rows: list[list[tuple[int, bool]]]) -> None:
    batch = batch_of(rows)
    plan = make_plan(batch, vocabulary=3)
    if plan is None:
        return
    blocks = np.concatenate([bucket.nodes.ravel() for bucket in plan.buckets])
    starts = np.concatenate(
        [(np.arange(b.nodes.size) // b.nodes.shape[1]) * b.nodes.shape[1] for b in plan.buckets]
    ) + np.repeat(np.cumsum([0, *(b.nodes.size for b in plan.buckets[:-1])]), [b.nodes.size for b in plan.buckets])
    for prefix, place in zip(needed_prefixes(batch), plan.attended, strict=True):
        seen = blocks[starts[place] : place + 1]
        assert tuple(plan.tokens[seen].tolist()) == prefix
        assert plan.positions[seen].tolist() == list(range(len(prefix)))


@settings(max_examples=40)
@given(TOKEN_ROWS)
def test_each_trainable_token_is_predicted_from_the_prefix_before_it(rows: list[list[tuple[int, bool]]]) -> None:
    batch = batch_of(rows)
    plan, prefixes = make_plan(batch, vocabulary=3), needed_prefixes(batch)
    if plan is None:
        return
    tokens, mask = batch.ragged(TOKENS), batch.ragged(LOSS_MASK)
    assert plan.trainable.tolist() == np.flatnonzero(mask.values).tolist()
    assert len(np.unique(plan.predicting)) == len(plan.predicting)
    for place, target, row, predictor in zip(plan.trainable, plan.targets, plan.sequence, plan.predictor, strict=True):
        before = tuple(tokens.values[tokens.offsets[row] : place].tolist())
        assert prefixes[plan.predicting[predictor]] == before
        assert target == tokens.values[place]


@settings(max_examples=40)
@given(st.integers(1, 5000))
def test_padding_of_a_row_depends_on_its_own_length_and_stays_below_a_quarter(length: int) -> None:
    tokens = np.zeros(length + 1, dtype=np.int32)
    mask = np.arange(length + 1) == length
    plan = make_plan(
        Batch(
            rows=np.arange(1),
            columns={TOKENS: Ragged.from_arrays([tokens]), LOSS_MASK: Ragged.from_arrays([mask])},
        ),
        vocabulary=1,
    )
    assert plan is not None
    padded = plan.buckets[0].nodes.shape[1]
    assert length <= padded < max(length + 8, 1.25 * length)


def test_a_group_computes_its_prompt_once(rows: Callable[..., Batch]) -> None:
    prompt = [1, 5, 6, 7, 8, 9]
    plan = make_plan(rows([[*prompt, 10 + i, 2] for i in range(8)], prompt=6), vocabulary=64)
    assert plan is not None
    assert len(plan.tokens) == 6 + 8
    assert len(plan.predicting) == 1 + 8


def test_splitting_rows_covers_them_in_order_within_the_budget(batch: Callable[..., Batch]) -> None:
    parts = list(split_rows(batch([4, 4, 9, 2, 2, 2, 20, 1]), tokens=8))
    assert [part.tolist() for part in parts] == [[0, 1], [2], [3, 4, 5], [6], [7]]
    assert list(split_rows(batch([]), tokens=8)) == []


def test_an_unknown_token_id_is_refused_by_row_and_id(rows: Callable[..., Batch]) -> None:
    with pytest.raises(ContractError, match="row 1 has token id 64; the model's ids are 0 to 63"):
        make_plan(rows([[1, 5, 6], [1, 64, 6]]), vocabulary=64)


def test_a_mask_of_other_lengths_is_refused(rows: Callable[..., Batch]) -> None:
    good = rows([[1, 5, 6], [1, 4]])
    other = good.with_columns({LOSS_MASK: rows([[1, 5], [1, 4, 4]]).ragged(LOSS_MASK)})
    with pytest.raises(ContractError, match="'loss_mask' is not aligned with 'tokens'"):
        make_plan(other, vocabulary=64)


def test_a_trained_first_token_is_refused(rows: Callable[..., Batch]) -> None:
    with pytest.raises(ContractError, match="row 0 trains its first token, which nothing predicts"):
        make_plan(rows([[1, 5, 6]], prompt=0), vocabulary=64)
