"""The age of the oldest group, from looks at the ledger alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.flow.ages import Ages

Steps = list[tuple[int, int]]


@given(steps=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_the_oldest_is_as_old_as_the_first_look_that_saw_it(steps: Steps) -> None:
    ages, seen = Ages(), dict[int, float]()
    oldest = end = 0
    for now, (opened, closed) in enumerate(steps):
        end += opened
        oldest = min(end, oldest + closed)
        ages.look(float(now), oldest=oldest, end=end)
        for group in range(oldest, end):
            seen.setdefault(group, float(now))
        assert ages.oldest(now + 0.5) == (now + 0.5 - seen[oldest] if oldest < end else 0.0)


def test_memory_does_not_grow_while_the_oldest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.flow.ages._MARKS", 8)
    ages = Ages()
    for now in range(1000):
        ages.look(float(now), oldest=0, end=now + 1)
        assert len(ages._marks) <= 16
    assert ages.oldest(1000.0) == 1000.0
