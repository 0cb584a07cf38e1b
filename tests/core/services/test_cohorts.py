"""Requests that are decoded together: begun whole, in order, and never waiting for who will not come."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import numpy as np
import pytest

from headrace.contract import GenerationRequest, Sampling
from headrace.errors import EngineError
from headrace.services import cohorts as module
from headrace.services.cohorts import Cohorts
from support.desk import turns


def request(trajectory: int, attempt: int = 0) -> GenerationRequest:
    return GenerationRequest(
        request_id=f"{trajectory}-{attempt}",
        prompt=np.zeros(1, dtype=np.int32),
        sampling=Sampling(max_new_tokens=1, temperature=1.0, seed=0),
        version=0,
    )


class Engine:
    """Remembers what was submitted together; requests wait for :meth:`answer`."""

    def __init__(self) -> None:
        self.submitted: list[list[str]] = []
        self.supervised: list[asyncio.Task[None]] = []
        self.cohorts = Cohorts(submit=self.submit, supervise=self.supervise, name="rollout-0")
        self._answers: dict[str, asyncio.Future[None]] = {}

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.submitted.append([r.request_id for r in requests])

    def supervise(self, work: Coroutine[Any, Any, None], name: str) -> None:
        self.supervised.append(asyncio.ensure_future(work))

    def ask(self, cohort: str, size: int, trajectory: int, attempt: int = 0) -> asyncio.Task[bool]:
        """As the instance serves a request; whether it came too late."""
        answer = self._answers[f"{trajectory}-{attempt}"] = asyncio.get_running_loop().create_future()

        async def serve() -> bool:
            with self.cohorts.get(cohort, size).entered(trajectory, request(trajectory, attempt)) as late:
                await answer
            return late

        return asyncio.ensure_future(serve())

    def answer(self, *requests: str) -> None:
        for name in requests:
            self._answers[name].set_result(None)


async def test_a_cohort_begins_when_it_is_complete_in_trajectory_order() -> None:
    engine = Engine()
    for trajectory in (2, 0, 1):
        assert engine.submitted == []
        engine.ask("c", 3, trajectory)
        await turns()
    assert engine.submitted == [["0-0", "1-0", "2-0"]]


async def test_cohorts_take_turns() -> None:
    engine = Engine()
    for cohort, trajectory in (("first", 0), ("second", 1)):
        engine.ask(cohort, 1, trajectory)
    await turns()
    assert engine.submitted == [["0-0"]]
    engine.answer("0-0")
    await turns()
    assert engine.submitted == [["0-0"], ["1-0"]]


async def test_a_withdrawn_trajectory_is_not_waited_for() -> None:
    engine = Engine()
    engine.ask("c", 2, 0)
    await turns()
    engine.cohorts.get("c", 2).withdraw(1)
    await turns()
    assert engine.submitted == [["0-0"]]


async def test_a_cohort_that_everybody_leaves_lets_the_next_begin() -> None:
    engine = Engine()
    for trajectory in range(2):
        engine.cohorts.get("c", 2).withdraw(trajectory)
    engine.ask("next", 1, 5)
    await turns()
    assert engine.submitted == [["5-0"]]


async def test_a_request_whose_caller_goes_away_before_its_cohort_begins_is_not_waited_for() -> None:
    engine = Engine()
    leaving = engine.ask("c", 2, 0)
    await turns()
    leaving.cancel()
    await turns()
    engine.ask("c", 2, 1)
    await turns()
    assert engine.submitted == [["1-0"]]


async def test_a_request_whose_caller_goes_away_afterwards_holds_nobody_up() -> None:
    engine = Engine()
    leaving = engine.ask("c", 1, 0)
    engine.ask("next", 1, 1)
    await turns()
    leaving.cancel()
    await turns()
    assert engine.submitted == [["0-0"], ["1-0"]]


async def test_a_second_try_takes_the_first_one_s_place_and_ends_its_call() -> None:
    engine = Engine()
    first = engine.ask("c", 2, 0)
    await turns()
    second = engine.ask("c", 2, 0, attempt=1)
    await turns()
    assert first.cancelled()
    engine.ask("c", 2, 1)
    await turns()
    assert engine.submitted == [["0-1", "1-0"]]
    engine.answer("0-1")
    assert await second is False


async def test_a_second_try_of_a_withdrawn_trajectory_is_part_of_a_cohort_that_has_not_begun() -> None:
    engine = Engine()
    engine.cohorts.get("c", 3).withdraw(0)
    engine.ask("c", 3, 0, attempt=1)
    engine.ask("c", 3, 1)
    await turns()
    assert engine.submitted == []
    engine.ask("c", 3, 2)
    await turns()
    assert engine.submitted == [["0-1", "1-0", "2-0"]]


async def test_a_second_try_that_comes_after_its_cohort_has_begun_is_told_so() -> None:
    engine = Engine()
    engine.ask("c", 1, 0)
    await turns()
    engine.answer("0-0")
    await turns()
    late = engine.ask("c", 1, 0, attempt=1)
    engine.answer("0-1")
    assert await late is True
    assert engine.submitted == [["0-0"]]


async def test_a_cohort_that_is_never_complete_says_how_far_it_got(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "COHORT_DEADLINE", 0.01)
    engine = Engine()
    asked = engine.ask("c", 3, 0)
    await turns()
    engine.cohorts.get("c", 3).withdraw(1)
    with pytest.raises(EngineError, match="1 of 2 requests of cohort c"):
        await engine.supervised[0]
    asked.cancel()


async def test_only_the_newest_begun_cohorts_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "REMEMBERED", 2)
    engine = Engine()
    for number in range(4):
        engine.cohorts.get(f"c{number}", 1).withdraw(0)
        await turns()
    assert list(engine.cohorts._cohorts) == ["c2", "c3"]
