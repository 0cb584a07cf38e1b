"""Calls counted by how long they took."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.wire.latency import Latency


@given(taken=st.lists(st.floats(0, 1e6), max_size=50))
def test_a_call_is_in_every_class_whose_bound_it_is_below(taken: list[float]) -> None:
    latency = Latency()
    for seconds in taken:
        latency.add(seconds)
    classes = list(latency.up_to())
    assert [bound for bound, _ in classes] == sorted(bound for bound, _ in classes)
    assert classes[-1] == (float("inf"), len(taken))
    assert latency.total == pytest.approx(sum(taken))
    for bound, count in classes:
        assert sum(seconds < 0.999 * bound for seconds in taken) <= count <= sum(s <= 1.001 * bound for s in taken)
