"""Loss weights and denominators of ``headrace_algorithms.aggregation``."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract import Array, Batch
from headrace.contract.columns import GROUP
from headrace_algorithms.aggregation import Aggregation, Normalisers, normalisers
from headrace_algorithms.rows import groups_of

AGGREGATIONS: tuple[Aggregation, ...] = get_args(Aggregation)
ROWS = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3)), min_size=1, max_size=10)
"""(trainable tokens, group) of each row."""


def normalise(rows: list[tuple[int, int]], aggregation: Aggregation) -> Normalisers:
    tokens = np.array([n for n, _ in rows], dtype=np.int64)
    groups = np.array([g for _, g in rows], dtype=np.int64)
    batch = Batch(rows=np.arange(len(rows), dtype=np.int64), columns={GROUP: groups})
    return normalisers(tokens, groups_of(batch), aggregation=aggregation, constant_length=7.0)


def loss(values: list[Array], normal: Normalisers) -> float:
    denominator = normal.denominators.sum()
    numerator = sum(w * v.sum() for w, v in zip(normal.weights, values, strict=True))
    return float(numerator / denominator) if denominator else 0.0


def defined(rows: list[tuple[int, int]], values: list[Array], aggregation: Aggregation) -> float:
    """The mean as its name says it, over rows that have tokens."""
    kept = [(v, g) for v, (n, g) in zip(values, rows, strict=True) if n]
    if not kept:
        return 0.0
    if aggregation == "token_mean":
        return float(np.concatenate([v for v, _ in kept]).mean())
    if aggregation == "sequence_mean_token_mean":
        return float(np.mean([v.mean() for v, _ in kept]))
    if aggregation == "sequence_mean_token_sum":
        return float(np.mean([v.sum() for v, _ in kept]))
    if aggregation == "constant":
        return float(np.mean([v.sum() / 7.0 for v, _ in kept]))
    groups = {g for _, g in kept}
    return float(np.mean([np.concatenate([v for v, h in kept if h == g]).mean() for g in groups]))


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(rows=ROWS, seed=st.integers(0, 100))
def test_weights_over_denominators_make_the_mean_of_the_name(
    aggregation: Aggregation, rows: list[tuple[int, int]], seed: int
) -> None:
    generator = np.random.default_rng(seed)
    values = [generator.normal(size=n) for n, _ in rows]
    assert loss(values, normalise(rows, aggregation)) == pytest.approx(defined(rows, values, aggregation), abs=1e-12)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
@given(rows=ROWS, other=st.integers(1, 9))
def test_another_group_changes_no_weight_and_no_denominator(
    aggregation: Aggregation, rows: list[tuple[int, int]], other: int
) -> None:
    alone, beside = normalise(rows, aggregation), normalise([*rows, (other, 99)], aggregation)
    np.testing.assert_array_equal(beside.weights[:-1], alone.weights)
    np.testing.assert_array_equal(beside.denominators[:-1], alone.denominators)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_a_row_without_trainable_tokens_adds_nothing(aggregation: Aggregation) -> None:
    normal = normalise([(3, 0), (0, 0), (0, 1)], aggregation)
    assert normal.denominators[1:].tolist() == [0.0, 0.0]
    assert normal.weights[1:].tolist() == [0.0, 0.0]
    assert np.isfinite(normal.weights).all()


def test_a_group_weighs_one_under_prompt_mean_whatever_its_tokens() -> None:
    normal = normalise([(1, 0), (9, 0), (2, 1)], "prompt_mean")
    np.testing.assert_allclose(normal.denominators, [0.1, 0.9, 1.0])
    np.testing.assert_allclose(normal.weights, [0.1, 0.1, 0.5])


def test_constant_without_its_length_is_an_error() -> None:
    batch = Batch(rows=np.arange(1), columns={GROUP: np.zeros(1, dtype=np.int64)})
    with pytest.raises(ValueError, match="constant_length"):
        normalisers(np.ones(1, dtype=np.int64), groups_of(batch), aggregation="constant")
