"""Rows that attend together: segments cover all rows, and sorting pays or does not happen."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace_torch.decode.order import cost, segments, sorting_moves

LENGTHS = st.lists(st.integers(1, 5000), min_size=1, max_size=100).map(lambda values: np.array(values, np.int64))
OVERHEAD = st.sampled_from([0, 1, 400, 10**9])


@given(lengths=LENGTHS, overhead=OVERHEAD)
def test_segments_cover_every_row_once_in_order_with_room_for_its_keys(lengths: np.ndarray, overhead: int) -> None:
    parts = segments(lengths, overhead=overhead)
    assert [p.first for p in parts] == list(np.cumsum([0, *(p.count for p in parts[:-1])]))
    assert sum(p.count for p in parts) == len(lengths)
    for part in parts:
        assert part.longest == lengths[part.first : part.first + part.count].max()


@given(lengths=LENGTHS, overhead=OVERHEAD)
def test_cutting_sorted_rows_never_costs_more_than_one_segment(lengths: np.ndarray, overhead: int) -> None:
    whole = len(lengths) * int(lengths.max()) + overhead
    assert cost(segments(-np.sort(-lengths), overhead=overhead), overhead=overhead) <= whole


@given(lengths=LENGTHS, overhead=OVERHEAD)
def test_sorting_keeps_every_row_and_lowers_the_cost(lengths: np.ndarray, overhead: int) -> None:
    sources, targets = sorting_moves(lengths, overhead=overhead)
    moved = lengths.copy()
    moved[targets] = lengths[sources]
    assert sorted(moved) == sorted(lengths)
    assert all(source != target for source, target in zip(sources, targets, strict=True))
    before, after = (cost(segments(x, overhead=overhead), overhead=overhead) for x in (lengths, moved))
    assert after < before if sources else after == before


def test_scattered_long_rows_are_gathered_in_front_of_the_others() -> None:
    lengths = np.full(64, 20)
    lengths[[3, 20, 40, 60]] = 1000
    sources, targets = sorting_moves(lengths, overhead=400)
    assert lengths[sources].tolist().count(1000) == 3, "the one that stands right stays"
    lengths[targets] = lengths[sources]
    assert [(p.count, p.longest) for p in segments(lengths, overhead=400)] == [(16, 1000), (48, 20)]


def test_rows_of_like_length_are_left_where_they_are() -> None:
    lengths = np.random.default_rng(0).integers(20, 24, 64)
    assert sorting_moves(lengths, overhead=400) == ([], [])
    assert len(segments(lengths, overhead=400)) == 1
