"""When there should be more rollout instances, and when fewer: the documented rules of Relax."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.flow.autoscale import AT_ONCE, REST_BEFORE_FEWER, REST_BEFORE_MORE, Autoscaler, Load

CALM = Load(kv_used=0.1, waiting=0, wait_seconds=0.0)
USUAL = Load(kv_used=0.6, waiting=3, wait_seconds=1.0)
UNKNOWN = Load(kv_used=None, waiting=None, wait_seconds=None)


class Run:
    """A fleet that does at once what it is told."""

    def __init__(self, instances: int = 2, *, least: int = 1, most: int = 16) -> None:
        self.policy = Autoscaler(least=least, most=most)
        self.instances, self.now = instances, 0.0

    def under(self, load: Load, seconds: float) -> int:
        """The number of instances after so many seconds of a load, looked at every second."""
        for _ in range(round(seconds)):
            self.instances = self.policy.target(load, instances=self.instances, now=self.now)
            self.now += 1.0
        return self.instances


@pytest.mark.parametrize(
    ("load", "seconds", "more"),
    [
        (Load(kv_used=0.9, waiting=0, wait_seconds=0.0), 30, 1),
        (Load(kv_used=0.5, waiting=21, wait_seconds=0.0), 20, 1),
        (Load(kv_used=0.5, waiting=45, wait_seconds=0.0), 20, 3),
        (Load(kv_used=0.5, waiting=1000, wait_seconds=0.0), 20, AT_ONCE),
        (Load(kv_used=0.5, waiting=1, wait_seconds=5.1), 15, 1),
        (Load(kv_used=None, waiting=None, wait_seconds=5.1), 15, 1),
    ],
)
def test_any_sign_of_crowding_that_lasts_brings_as_many_as_it_takes(load: Load, seconds: int, more: int) -> None:
    run = Run()
    assert run.under(load, seconds) == 2
    assert run.under(load, 1) == 2 + more


@pytest.mark.parametrize("pause", [USUAL, UNKNOWN])
def test_a_break_or_a_missing_value_starts_the_clock_again(pause: Load) -> None:
    run, full = Run(), Load(kv_used=0.9, waiting=0, wait_seconds=0.0)
    run.under(full, 29)
    run.under(pause, 1)
    assert run.under(full, 30) == 2
    assert run.under(full, 1) == 3


def test_after_a_change_nothing_is_added_until_it_can_show() -> None:
    run, full = Run(), Load(kv_used=0.86, waiting=0, wait_seconds=0.0)
    assert run.under(full, 31) == 3
    assert run.under(full, REST_BEFORE_MORE - 1) == 3
    assert run.under(full, 1) == 4


def test_one_leaves_when_all_has_been_calm_for_long_and_the_next_only_after_a_rest() -> None:
    run = Run(4)
    assert run.under(CALM, 120) == 4
    assert run.under(CALM, 1) == 3
    assert run.under(CALM, REST_BEFORE_FEWER - 1) == 3
    assert run.under(CALM, 1) == 2


@pytest.mark.parametrize(
    "load",
    [
        Load(kv_used=0.1, waiting=1, wait_seconds=0.0),
        Load(kv_used=0.35, waiting=0, wait_seconds=0.0),
        Load(kv_used=None, waiting=0, wait_seconds=0.0),
        Load(kv_used=0.1, waiting=None, wait_seconds=0.0),
    ],
)
def test_nobody_leaves_while_anything_is_not_calm_or_not_known(load: Load) -> None:
    assert Run(4).under(load, 1000) == 4


def test_nobody_leaves_whose_work_would_crowd_the_others() -> None:
    assert Run(2).under(Load(kv_used=0.29, waiting=0, wait_seconds=0.0), 1000) == 2
    assert Run(3).under(Load(kv_used=0.29, waiting=0, wait_seconds=0.0), 130) == 2


def test_the_bounds_hold_whatever_the_load() -> None:
    assert Run(2, least=2).under(CALM, 1000) == 2
    assert Run(1, least=3).under(UNKNOWN, 1) == 3
    assert Run(9, most=8).under(Load(kv_used=1.0, waiting=999, wait_seconds=99.0), 1000) == 8


@pytest.mark.parametrize(("least", "most"), [(0, 1), (3, 2)])
def test_bounds_that_no_number_meets_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="is at least 1 and at most"):
        Autoscaler(least=least, most=most)


VALUE = st.one_of(st.none(), st.floats(0, 1))
LOADS = st.lists(st.tuples(VALUE, st.one_of(st.none(), st.integers(0, 200)), st.integers(1, 100)), max_size=60)


@given(loads=LOADS, start=st.integers(1, 8))
@settings(deadline=None, derandomize=True)
def test_it_never_changes_its_mind_within_a_rest(loads: list[tuple[float | None, int | None, int]], start: int) -> None:
    policy, instances, now, changed = Autoscaler(least=1, most=8), start, 0.0, float("-inf")
    for kv, waiting, pause in loads:
        target = policy.target(
            Load(kv_used=kv, waiting=waiting, wait_seconds=None), instances=instances, now=(now := now + pause)
        )
        if target != instances:
            assert 1 <= target <= 8
            assert now - changed >= (REST_BEFORE_MORE if target > instances else REST_BEFORE_FEWER)
            assert instances - target <= 1
            assert target - instances <= AT_ONCE
            changed, instances = now, target
