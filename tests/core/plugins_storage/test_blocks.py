"""What is copied and what is not, and when rows that are left of a put move to memory of their own."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from headrace.contract import Array, Column, Ragged
from headrace_storage.blocks import LARGE_BYTES, Blocks, runs, values

ROWS = 8
Make = Callable[[int], Column]
"""A column of so many rows, whose values are all different, each of the bytes that are said."""


def dense(row_bytes: int, rows: int = ROWS) -> Array:
    return np.arange(rows * row_bytes // 8, dtype=np.int64).reshape(rows, row_bytes // 8)


def ragged(row_bytes: int, rows: int = ROWS) -> Ragged:
    return Ragged(dense(row_bytes, rows).reshape(-1), np.arange(rows + 1) * (row_bytes // 8))


def array_of(column: Column) -> Array:
    return column.values if isinstance(column, Ragged) else column


def read(blocks: Blocks, rows: list[int], name: str = "x") -> Column:
    return values(name, runs(rows, blocks.at))


def plain(column: Column) -> list[list[int]]:
    return [row.tolist() for row in column]


def kept(column: Column) -> Blocks:
    blocks = Blocks()
    blocks.put(list(range(len(column))), {"x": column})
    return blocks


@pytest.mark.parametrize("make", [dense, ragged])
def test_what_is_large_is_kept_and_read_without_a_copy_where_it_lies_side_by_side(make: Make) -> None:
    column = make(LARGE_BYTES)
    blocks = kept(column)
    for rows in ([*range(ROWS)], [2, 3, 4], [7]):
        found = read(blocks, rows)
        assert np.shares_memory(array_of(found), array_of(column)), rows
        assert plain(found) == [plain(column)[row] for row in rows]
    for rows in ([3, 2], [0, 2], [1, 1, 2]):
        found = read(blocks, rows)
        assert not np.shares_memory(array_of(found), array_of(column)), rows
        assert plain(found) == [plain(column)[row] for row in rows]


@pytest.mark.parametrize("make", [dense, ragged])
@pytest.mark.parametrize(("row_bytes", "copied"), [(LARGE_BYTES // ROWS - 8, True), (LARGE_BYTES // ROWS, False)])
def test_what_is_small_is_copied_when_it_is_put_and_when_it_is_read(make: Make, row_bytes: int, copied: bool) -> None:
    column = make(row_bytes)
    blocks = kept(column)
    assert np.shares_memory(array_of(blocks.at(0).columns["x"]), array_of(column)) != copied
    found = read(blocks, [*range(ROWS)])
    assert np.shares_memory(array_of(found), array_of(blocks.at(0).columns["x"])) != copied


@pytest.mark.parametrize("make", [dense, ragged])
def test_what_is_a_part_of_something_larger_does_not_pin_it(make: Make) -> None:
    whole = make(LARGE_BYTES)
    part = Ragged(whole.values[: whole.offsets[1]], whole.offsets[:2]) if isinstance(whole, Ragged) else whole[:1]
    blocks = kept(part)
    assert not np.shares_memory(array_of(read(blocks, [0])), array_of(whole))
    assert plain(read(blocks, [0])) == plain(whole)[:1]


@pytest.mark.parametrize("make", [dense, ragged])
@pytest.mark.parametrize("gone", [[0, 1, 2, 3], [7, 5, 3, 1]], ids=["side by side", "scattered"])
def test_rows_move_when_less_than_half_of_the_bytes_is_left_and_not_before(make: Make, gone: list[int]) -> None:
    column = make(64)
    blocks = kept(column)
    first = blocks.at(6)
    assert (first.live, first.pinned) == (ROWS * 64, ROWS * 64)
    assert blocks.delete(gone) == 4 * 64
    assert blocks.at(6) is first
    assert (first.live, first.pinned) == (4 * 64, ROWS * 64)
    assert blocks.delete([4]) == 64
    left = [row for row in range(ROWS) if row not in (*gone, 4)]
    moved = blocks.at(left[0])
    assert moved is not first
    assert (moved.rows, moved.live, moved.pinned) == (left, 3 * 64, 3 * 64)
    assert {blocks.at(row) for row in left} == {moved}
    assert len(blocks) == 3
    assert plain(read(blocks, left)) == [plain(column)[row] for row in left]


def test_bytes_are_those_of_the_rows_that_go_however_unlike_they_are() -> None:
    blocks = Blocks()
    lengths = [5, 0, 1, 7, 2]
    tokens = Ragged.from_arrays([np.full(length, length, np.int32) for length in lengths])
    assert blocks.put([*range(5)], {"tokens": tokens, "pair": np.zeros((5, 2), np.int16)}) == 4 * 15 + 4 * 5
    assert blocks.delete([1]) == 4
    assert blocks.delete([4, 0]) == 4 * 7 + 2 * 4
    assert blocks.delete([2, 3]) == 4 * 8 + 2 * 4
    assert len(blocks) == 0


def test_rows_of_several_puts_are_read_and_deleted_in_any_order() -> None:
    blocks = Blocks()
    for first in (0, 10, 20):
        blocks.put([first, first + 1, first + 2], {"x": np.arange(first, first + 3), "y": ragged(8, 3)})
    assert blocks.among([1, 5, 21, 9]) == [1, 21]
    assert plain_numbers(read(blocks, [21, 0, 1, 12, 2])) == [21, 0, 1, 12, 2]
    assert plain(read(blocks, [12, 10, 11], "y")) == [[2], [0], [1]]
    assert blocks.delete([21, 0, 20, 1]) == 4 * 16
    assert blocks.among([0, 1, 2, 20, 21, 22]) == [2, 22]
    assert plain_numbers(read(blocks, [22, 2])) == [22, 2]
    with pytest.raises(KeyError):
        read(blocks, [0])


def plain_numbers(column: Column) -> list[int]:
    return [int(value) for value in column]
