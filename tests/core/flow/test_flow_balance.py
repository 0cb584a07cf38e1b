"""Equal shares of work over ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.balance import balanced_shares, most_within


@given(sizes=st.lists(st.integers(0, 1000), max_size=40), ranks=st.integers(1, 9))
def test_every_item_is_in_one_share_and_counts_differ_by_at_most_one(sizes: list[int], ranks: int) -> None:
    shares = balanced_shares(sizes, ranks)
    assert len(shares) == ranks
    assert sorted(itertools.chain.from_iterable(share.tolist() for share in shares)) == list(range(len(sizes)))
    counts = [len(share) for share in shares]
    assert max(counts) - min(counts) <= 1
    assert all((np.diff(share) > 0).all() for share in shares)


def test_shares_of_log_normal_lengths_are_within_five_per_cent_where_equal_counts_alone_are_not() -> None:
    lengths = np.random.default_rng(0).lognormal(6, 1, size=256).astype(int).tolist()
    shares = balanced_shares(lengths, 8)
    tokens = [sum(lengths[item] for item in share) for share in shares]
    in_order = [sum(lengths[start : start + 32]) for start in range(0, 256, 32)]
    assert max(tokens) / np.mean(tokens) < 1.05
    assert max(in_order) / np.mean(in_order) > 1.05


def test_the_best_division_is_found_where_it_is_plain() -> None:
    shares = balanced_shares([9, 1, 8, 2, 7, 3], 3)
    assert [sorted(share.tolist()) for share in shares if 0 in share] == [[0, 1]]


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 1"):
        balanced_shares([1], 0)


@given(
    sizes=st.lists(st.integers(1, 100), min_size=1, max_size=30), ranks=st.integers(1, 5), budget=st.integers(1, 300)
)
def test_what_is_said_to_fit_fits_every_rank_unless_it_is_one_item_each(
    sizes: list[int], ranks: int, budget: int
) -> None:
    count = most_within(sizes, budget, ranks)
    heaviest = max(sum(sizes[item] for item in share) for share in balanced_shares(sizes[:count], ranks))
    assert heaviest <= budget or count == min(ranks, len(sizes))
    if ranks == 1 and count < len(sizes):
        assert sum(sizes[: count + 1]) > budget
