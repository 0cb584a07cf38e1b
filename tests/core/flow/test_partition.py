"""How many instances each version gets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.flow.partition import partition

DEMANDS = st.dictionaries(st.integers(0, 9), st.integers(0, 400), max_size=6)


@pytest.mark.parametrize(
    ("demand", "seats"),
    [
        ({0: 1, 1: 1, 2: 30}, {0: 1, 1: 1, 2: 6}),
        ({0: 10, 1: 10, 2: 10}, {0: 2, 1: 3, 2: 3}),
        ({0: 24, 1: 40}, {0: 3, 1: 5}),
        ({0: 0, 1: 5}, {1: 8}),
        ({}, {}),
    ],
)
def test_plain_roundings_counter_examples_come_out_right(demand: dict[int, int], seats: dict[int, int]) -> None:
    assert partition(demand, seats=8, instances=8) == seats


def test_with_fewer_instances_than_versions_the_oldest_come_first() -> None:
    assert partition({3: 1, 4: 50, 5: 50}, seats=2, instances=2) == {3: 1, 4: 1, 5: 0}


def test_instances_that_host_several_versions_have_a_seat_for_each() -> None:
    assert partition({0: 1, 1: 30}, seats=8, instances=4) == {0: 4, 1: 4}, "both are everywhere"
    assert partition({0: 1, 1: 1, 2: 30}, seats=8, instances=4) == {0: 2, 1: 2, 2: 4}, "the newest is everywhere"


@given(demand=DEMANDS, instances=st.integers(0, 40), several=st.integers(1, 3))
def test_every_seat_goes_to_somebody_and_every_live_version_has_one(
    demand: dict[int, int], instances: int, several: int
) -> None:
    live = [version for version, count in demand.items() if count]
    seats = partition(demand, seats=instances * several, instances=instances)
    assert sorted(seats) == sorted(live)
    assert all(count <= instances for count in seats.values())
    assert sum(seats.values()) == (min(instances * several, instances * len(live)))
    if len(live) <= instances * several:
        assert all(count >= 1 for count in seats.values()) or not live


@given(demand=DEMANDS, instances=st.integers(6, 40))
def test_seats_are_within_one_of_the_demand_unless_the_floor_takes_them(demand: dict[int, int], instances: int) -> None:
    total = sum(demand.values())
    seats = partition(demand, seats=instances, instances=instances)
    quotas = {version: instances * count / total for version, count in demand.items() if count}
    for version, quota in quotas.items():
        if min(quotas.values()) >= 1:
            assert abs(seats[version] - quota) < 1
        else:
            assert seats[version] < max(quota, 1) + 1
        assert all(seats[version] <= seats[other] for other in quotas if quotas[other] > quota)
