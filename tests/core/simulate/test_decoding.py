"""The model of an engine: slots, a decode step that grows with what runs, a KV cache that runs full, pauses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import simpy
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.config import SimulationConfig
from headrace.simulate.decoding import Engine, Request


class Bench:
    """An engine alone. ``done``: trajectory → when it was."""

    def __init__(self, *, slots: int, filled: Callable[[float], None] = lambda share: None, **costs: Any) -> None:
        self.clock = simpy.Environment()
        self.done: dict[int, float] = {}
        config = SimulationConfig(**{"step_seconds": 1.0, **costs})
        self.engine = Engine(self.clock, "rollout-0", slots=slots, costs=config, finished=self._finished, filled=filled)

    def _finished(self, trajectory: int) -> None:
        assert trajectory not in self.done
        self.done[trajectory] = self.clock.now

    def run(self, *lengths: float, prompt: float = 0.0) -> dict[int, float]:
        for trajectory, tokens in enumerate(lengths):
            self.engine.submit(Request(trajectory, prompt, tokens))
        self.clock.run()
        return self.done


def test_requests_beyond_the_slots_wait_for_the_first_that_is_done() -> None:
    assert Bench(slots=2).run(10, 3, 4) == pytest.approx({1: 3.0, 2: 7.0, 0: 10.0})


def test_a_step_is_slower_the_more_requests_run() -> None:
    """3 steps of 1.5 s with two, then 7 of 1 s with the one that is left."""
    assert Bench(slots=2, step_seconds_per_request=0.5).run(10, 3) == pytest.approx({1: 4.5, 0: 11.5})


def test_prefill_holds_up_everything_that_decodes() -> None:
    done = Bench(slots=1, prefill_seconds_per_token=0.1).run(5, 5, prompt=20)
    assert done == pytest.approx({0: 7.0, 1: 14.0})


def test_nothing_is_decoded_during_a_pause() -> None:
    bench = Bench(slots=1)
    bench.engine.submit(Request(0, 0, 10))
    bench.clock.run(until=4)
    bench.engine.pause(3)
    bench.clock.run()
    assert bench.done == pytest.approx({0: 13.0})


def test_a_full_kv_cache_puts_the_newest_request_back_and_its_tokens_are_prefilled_again() -> None:
    """Each of two is at 5 tokens when the 10 are used up; the newer waits for the older, then has 5 tokens to go."""
    bench = Bench(slots=2, kv_tokens=10)
    assert bench.run(8, 8) == pytest.approx({0: 8.0, 1: 11.0})
    assert bench.engine.prefilled_again == pytest.approx(5.0)


def test_an_engine_that_stops_returns_what_it_had_and_finishes_none_of_it() -> None:
    bench = Bench(slots=2)
    for trajectory in range(4):
        bench.engine.submit(Request(trajectory, 0, 10))
    bench.clock.run(until=5)
    assert sorted(bench.engine.stop()) == [0, 1, 2, 3]
    bench.clock.run()
    assert bench.done == {}
    assert bench.engine.busy_seconds == pytest.approx(2 * 5.0)


def test_a_request_goes_on_on_another_engine_where_it_was_with_what_was_computed() -> None:
    first, second = (Bench(slots=1, prefill_seconds_per_token=0.1) for _ in range(2))
    first.engine.submit(Request(0, 20, 10))
    first.clock.run(until=6)  # two for the prompt, four tokens
    moved = first.engine.hand_over(0)
    assert moved == pytest.approx(Request(0, context=24, missing=6, cached=24))
    second.engine.submit(moved)
    first.clock.run()
    second.clock.run()
    assert first.done == {}
    assert second.done == pytest.approx({0: 6.0})


def test_a_request_without_its_kv_is_computed_again_where_it_goes_on() -> None:
    bench = Bench(slots=1, prefill_seconds_per_token=0.1)
    bench.engine.submit(Request(0, context=24, missing=6))
    bench.clock.run()
    assert bench.done == pytest.approx({0: 2.4 + 6.0})


def test_a_request_that_waits_for_a_slot_moves_as_it_came_and_the_next_takes_the_slot_of_one_that_left() -> None:
    bench = Bench(slots=1)
    for trajectory in range(3):
        bench.engine.submit(Request(trajectory, 0, 10))
    assert bench.engine.hand_over(1) == Request(1, 0, 10)
    assert bench.engine.hand_over(0) == Request(0, 0, 10)
    assert bench.engine.hand_over(7) is None
    bench.clock.run()
    assert bench.done == pytest.approx({2: 10.0})


def test_an_engine_tells_how_full_its_kv_cache_is_where_that_is_limited() -> None:
    told: list[float] = []
    bench = Bench(slots=2, kv_tokens=100, filled=told.append)
    bench.run(10, 20, prompt=20)
    assert told == pytest.approx([0.2, 0.4, 0.3, 0.0])


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=30),
    slots=st.integers(1, 6),
    kv_tokens=st.one_of(st.none(), st.integers(71, 300)),
    rise=st.sampled_from([0.0, 0.3]),
)
def test_every_request_is_done_once_and_never_faster_than_alone(
    lengths: list[int], slots: int, kv_tokens: int | None, rise: float
) -> None:
    bench = Bench(slots=slots, kv_tokens=kv_tokens, step_seconds_per_request=rise)
    done = bench.run(*lengths, prompt=10)
    assert sorted(done) == list(range(len(lengths)))
    assert all(done[trajectory] >= tokens - 1e-3 for trajectory, tokens in enumerate(lengths))
    assert bench.engine.busy_seconds >= sum(lengths) - 1e-3
    assert max(done.values()) >= sum(lengths) / slots - 1e-3
