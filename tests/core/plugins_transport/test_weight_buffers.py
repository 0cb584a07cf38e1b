"""Memory that tensors are received in is used again, and never while somebody has it."""

from __future__ import annotations

import numpy as np

from headrace_weights.memory import Buffers

LARGE = 1 << 20


def place(array: np.ndarray) -> int:
    return array.__array_interface__["data"][0]


def test_memory_that_nobody_has_any_more_is_used_again() -> None:
    buffers = Buffers(spare_bytes=LARGE)
    first = buffers.take(LARGE)
    before = place(first)
    del first
    assert place(buffers.take(LARGE)) == before


def test_memory_of_which_somebody_has_a_view_is_not() -> None:
    buffers = Buffers(spare_bytes=LARGE)
    first = buffers.take(LARGE)
    view = first[100:200].view(np.float32).reshape(5, 5)
    del first
    other = buffers.take(LARGE)
    other[...] = 1
    assert not view.any()
    assert not np.shares_memory(view, other)


def test_no_more_is_kept_than_may_be_spare() -> None:
    buffers = Buffers(spare_bytes=2 * LARGE)
    held = [buffers.take(LARGE) for _ in range(5)]
    places = [place(array) for array in held]
    while held:
        del held[0]
    assert {place(array) for array in [buffers.take(LARGE), buffers.take(LARGE)]} == set(places[-2:])


def test_small_arrays_are_numpy_s_own() -> None:
    assert Buffers(spare_bytes=0).take(100).flags.owndata
