"""Ragged columns."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.contract import Ragged, join_columns

LENGTHS = st.lists(st.integers(0, 5) | st.integers(60, 100), max_size=6)


def ragged(lengths: Sequence[int], shape: tuple[int, ...]) -> Ragged:
    total = sum(lengths)
    values = np.arange(total * int(np.prod(shape)), dtype=np.int32).reshape(total, *shape)
    return Ragged(values, np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)]))


@given(LENGTHS, st.sampled_from([(), (2,), (0,), (2, 3)]), st.data())
def test_rows_are_taken_in_the_order_asked_for_as_a_copy_of_the_same_kind(
    lengths: list[int], shape: tuple[int, ...], data: st.DataObject
) -> None:
    column = ragged(lengths, shape)
    places = st.integers(-len(lengths), len(lengths) - 1) if lengths else st.nothing()
    chosen = data.draw(st.lists(places, max_size=8 if lengths else 0))
    taken = column.take(chosen)
    assert [row.tolist() for row in taken] == [column[place].tolist() for place in chosen]
    assert (taken.values.dtype, taken.values.shape[1:]) == (column.values.dtype, shape)
    assert not np.shares_memory(taken.values, column.values)


@pytest.mark.parametrize("place", [2, -3])
def test_a_row_that_is_not_there_cannot_be_taken(place: int) -> None:
    with pytest.raises(IndexError, match=f"row {place} of a ragged column with 2 rows"):
        ragged([1, 2], ()).take([0, place])


@given(st.lists(LENGTHS, min_size=1, max_size=4), st.sampled_from([(), (2,), (0,)]))
def test_joined_columns_have_all_rows_in_order(parts: list[list[int]], shape: tuple[int, ...]) -> None:
    columns = [ragged(lengths, shape) for lengths in parts]
    joined = join_columns(columns)
    assert isinstance(joined, Ragged)
    assert [row.tolist() for row in joined] == [row.tolist() for column in columns for row in column]
    dense = join_columns([column.values for column in columns])
    assert isinstance(dense, np.ndarray)
    assert dense.tolist() == [value for column in columns for value in column.values.tolist()]
