"""How a batch is made up and cut."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flow.batching import micro_batches, mini_batches, oldest_first


def test_a_batch_takes_the_oldest_versions_first() -> None:
    assert oldest_first({4: 3, 2: 1, 3: 2}, groups=4) == {2: 1, 3: 2, 4: 1}
    assert oldest_first({4: 3, 2: 1}, groups=4) == {2: 1, 4: 3}


def test_a_batch_is_never_short() -> None:
    assert oldest_first({4: 3}, groups=4) is None
    assert oldest_first({}, groups=1) is None


def test_every_mini_batch_has_an_equal_share_of_every_group() -> None:
    groups = np.array([7, 7, 3, 3, 9, 9, 5, 5])
    parts = [part.tolist() for part in mini_batches(groups, count=2)]
    assert parts == [[2, 6, 0, 4], [3, 7, 1, 5]]


@settings(max_examples=30, deadline=None)
@given(sizes=st.lists(st.integers(1, 5), min_size=1, max_size=12), data=st.data())
def test_mini_batches_keep_every_row_once_and_spread_every_group(sizes: list[int], data: st.DataObject) -> None:
    groups = np.repeat(np.arange(len(sizes)) * 3, sizes)
    groups = groups[np.array(data.draw(st.permutations(range(len(groups)))))]
    count = data.draw(st.integers(1, len(groups)))
    parts = mini_batches(groups, count=count)
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(groups)))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert all(np.all(np.diff(groups[part]) >= 0) for part in parts)
    for group in set(groups.tolist()):
        shares = [int((groups[part] == group).sum()) for part in parts]
        assert max(shares) - min(shares) <= 1


@pytest.mark.parametrize("count", [0, 4])
def test_a_mini_batch_is_never_empty(count: int) -> None:
    with pytest.raises(ValueError, match="3 rows cannot fill"):
        mini_batches(np.array([0, 0, 1]), count=count)


def test_micro_batches_fill_the_token_budget_in_the_order_given() -> None:
    lengths = np.array([4, 4, 4, 9, 1, 30, 2])
    parts = [part.tolist() for part in micro_batches(lengths, token_budget=10)]
    assert parts == [[0, 1], [2], [3, 4], [5], [6]]
    parts = [part.tolist() for part in micro_batches(lengths, token_budget=10, rows=np.array([6, 4, 2]))]
    assert parts == [[6, 4, 2]]


@settings(max_examples=30, deadline=None)
@given(lengths=st.lists(st.integers(0, 40), max_size=30), budget=st.integers(1, 60))
def test_micro_batches_keep_every_row_once_within_the_budget(lengths: list[int], budget: int) -> None:
    parts = micro_batches(np.array(lengths, dtype=np.int64), token_budget=budget)
    assert [row for part in parts for row in part.tolist()] == list(range(len(lengths)))
    tokens = [sum(lengths[row] for row in part) for part in parts]
    assert all(total <= budget or len(part) == 1 for total, part in zip(tokens, parts, strict=True))


def test_no_rows_make_no_micro_batches() -> None:
    assert micro_batches(np.array([3, 4]), token_budget=5, rows=np.array([], dtype=np.int64)) == []


def test_a_token_budget_below_one_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        micro_batches(np.array([3]), token_budget=0)
