"""Moves in the simulator: what they cost, and what becomes of a request whose instance fails while it travels."""

from __future__ import annotations

from typing import Any

import pytest
import simpy

from headrace.flow import Flow
from headrace.simulate.decoding import Request
from headrace.simulate.fleet import Fleet
from headrace.simulate.moving import Moving
from support.virtual_job import multi_version, scenario


class Bench:
    """Two instances of a slot each, of which the first has trajectory 0, a prompt of 20 tokens and 10 to come. At 6 s
    four of these are there, its memory is full, and the request is bound for the second."""

    def __init__(self, *, migrates: bool = True, **costs: float) -> None:
        self.clock = simpy.Environment()
        self.flow = Flow(policy=multi_version(2).policy, batch_groups=4, group_size=1)
        costs = {"prompt_tokens": 20, "prefill_seconds_per_token": 0.1, **costs}
        at = scenario(slots=1, migrates=migrates, costs=costs)
        self.done: dict[int, float] = {}
        self.arrived: list[tuple[int, str, float]] = []
        self.fleet = Fleet(self.clock, self.flow, at, finished=self._finished, lost=self._ignore, changed=lambda: None)
        self.moving = Moving(self.clock, self.flow, self.fleet, at.costs, arrived=self._arrived)
        ticket = self.flow.next_ticket()
        assert ticket is not None
        assert ticket.instances == ("rollout-0",)
        self.fleet.engine("rollout-0").submit(Request(0, 20, 10))
        self.clock.run(until=6)
        self.flow.kv_used("rollout-0", 1.0)
        self.moving.begin()

    def _finished(self, trajectory: int) -> None:
        self.flow.generated(trajectory)
        self.done[trajectory] = self.clock.now

    def _arrived(self, trajectory: int, source: str) -> None:
        self.arrived.append((trajectory, source, self.clock.now))

    def _ignore(self, *lost: Any) -> None:
        raise AssertionError("nothing fails by itself")

    def fail(self, name: str) -> None:
        self.flow.leave(name)
        self.fleet.engine(name).stop()
        self.moving.lost(name)


def test_keys_and_values_take_their_time_and_are_not_computed_again() -> None:
    bench = Bench(move_seconds=2.0, move_seconds_per_token=0.5)
    bench.clock.run()
    assert bench.arrived == [(0, "rollout-0", 6 + 2 + 24 * 0.5)]
    assert bench.done == pytest.approx({0: 20 + 6})
    assert (bench.moving.done, bench.moving.prefilled_again) == (1, 0)


def test_without_keys_and_values_the_context_is_computed_again() -> None:
    bench = Bench(migrates=False, move_seconds=2.0, move_seconds_per_token=0.5)
    bench.clock.run()
    assert bench.done == pytest.approx({0: 8 + 24 * 0.1 + 6})
    assert bench.moving.prefilled_again == pytest.approx(24)


def test_a_request_whose_target_fails_goes_on_where_it_was() -> None:
    bench = Bench(move_seconds=2.0)
    bench.clock.run(until=7)
    bench.fail("rollout-1")
    bench.clock.run()
    assert bench.done == pytest.approx({0: 7 + 6})
    assert bench.moving.done == 0


def test_a_request_whose_source_fails_is_for_the_flow_to_place_again() -> None:
    bench = Bench(move_seconds=2.0)
    bench.clock.run(until=7)
    bench.fail("rollout-0")
    bench.clock.run()
    assert bench.done == {}
    assert bench.flow.unplaced() == (0,)
    assert bench.flow.place_again(0) == "rollout-1"


def test_a_request_whose_group_is_dropped_arrives_nowhere() -> None:
    bench = Bench(move_seconds=2.0)
    bench.flow.drop_group(0, "failed")
    bench.clock.run()
    assert (bench.done, bench.arrived, bench.moving.done) == ({}, [], 0)


def test_a_request_that_is_not_there_yet_stays() -> None:
    bench = Bench(move_seconds=2.0)
    bench.clock.run()
    assert bench.flow.next_ticket() is not None
    bench.flow.kv_used("rollout-1", 1.0)
    bench.flow.kv_used("rollout-0", 0.0)
    ticket = bench.flow.next_ticket()
    assert ticket is not None
    bench.flow.kv_used(ticket.instances[0], 1.0)
    bench.moving.begin()
    assert bench.flow.moves() == ()
    assert bench.flow.instance_of(ticket.trajectories[0]) == ticket.instances[0]
