"""An episode's calls, and what becomes of them when its instance is lost in the middle."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from headrace.contract import Completion
from headrace.errors import DeadlineError, WireError
from headrace.services.messages import Member, Placement, WorkItem
from headrace.services.own_time import OwnTime
from headrace.services.request_messages import Generated
from headrace.services.session import Instances, Session
from support.desk import Peer, turns

PROMPT = np.array([1, 2], dtype=np.int32)
ANSWER = Completion(
    token_ids=np.array([3], dtype=np.int32), logprobs=np.zeros(1, dtype=np.float32), spans=(), finish_reason="stop"
)


class Bench:
    """One trajectory at instance ``a``, in lockstep with another."""

    def __init__(self, *, instance: str = "a", attempt: int = 0, greedy: bool = False) -> None:
        self.peers = {name: Peer(name) for name in ("a", "b", "controller")}
        member = Member(
            trajectory=7,
            task=0,
            instance=instance,
            seed=5,
            attempt=attempt,
            cohort="rollout-3",
            cohort_size=2,
            greedy=greedy,
        )
        item = WorkItem(
            kind="rollout", group=3, version=3, split="train", members=[member], max_new_tokens=4, temperature=1.0
        )
        self.instances = Instances(connect=self.peers.__getitem__)  # type: ignore[arg-type]  # calls only
        self.own_time = OwnTime(0.01)
        controller: Any = self.peers["controller"]
        self.session = Session(
            self.instances, controller, worker="w.0", item=item, member=member, own_time=self.own_time
        )

    async def generate(self) -> asyncio.Task[Completion]:
        task = asyncio.ensure_future(self.session.generate(PROMPT))
        await turns()
        return task


async def test_a_call_whose_instance_is_lost_is_made_again_where_the_controller_says() -> None:
    bench = Bench()
    answer = await bench.generate()
    await bench.instances.lost("a")
    await turns()
    bench.peers["controller"].answer("place", Placement(instance="b", attempt=1))
    await turns()
    bench.peers["b"].answer("generate", Generated(completion=ANSWER))
    assert await answer is ANSWER
    (_, first), (_, second) = bench.peers["a"].asked + bench.peers["b"].asked
    assert second.request.version == first.request.version == 3
    assert second.request.sampling.seed == first.request.sampling.seed == 5
    assert second.request.request_id != first.request.request_id
    assert (first.cohort, second.cohort) == ("rollout-3", "")


async def test_it_is_made_a_third_time_when_that_one_is_lost_too() -> None:
    bench = Bench()
    answer = await bench.generate()
    await bench.instances.lost("a")
    await bench.instances.lost("b")
    await turns()
    bench.peers["c"] = Peer("c")
    for place in (Placement(instance="b", attempt=1), Placement(instance="c", attempt=2)):
        bench.peers["controller"].answer("place", place)
        await turns()
    bench.peers["c"].answer("generate", Generated(completion=ANSWER))
    assert await answer is ANSWER
    assert [request.attempt for _, request in bench.peers["controller"].asked] == [0, 1]


async def test_a_member_without_an_instance_asks_for_one_first() -> None:
    bench = Bench(instance="")
    answer = await bench.generate()
    bench.peers["controller"].answer("place", Placement(instance="b", attempt=0))
    await turns()
    bench.peers["b"].answer("generate", Generated(completion=ANSWER))
    assert await answer is ANSWER


async def test_an_error_of_an_instance_that_is_not_lost_is_the_episode_s() -> None:
    bench = Bench()
    answer = await bench.generate()
    bench.peers["a"].answer("generate", WireError("refused"))
    with pytest.raises(WireError, match="refused"):
        await answer


async def test_an_episode_that_never_asked_leaves_its_cohort() -> None:
    bench = Bench()
    leaving = asyncio.ensure_future(bench.session.withdraw())
    await turns()
    bench.peers["a"].answer("withdraw")
    await leaving
    assert [request.trajectory for _, request in bench.peers["a"].asked] == [7]


async def test_an_episode_that_asked_needs_no_leave_since_its_call_is_cancelled() -> None:
    bench = Bench()
    (await bench.generate()).cancel()
    await bench.session.withdraw()
    assert [method for method, _ in bench.peers["a"].asked] == ["generate"]


@pytest.mark.parametrize("instance", ["", "a"])
async def test_nobody_is_told_of_a_leave_when_there_is_no_instance(instance: str) -> None:
    bench = Bench(instance=instance)
    await bench.instances.lost("a")
    await bench.session.withdraw()
    assert bench.peers["a"].asked == []


async def test_a_leave_that_its_instance_does_not_survive_is_over() -> None:
    bench = Bench()
    leaving = asyncio.ensure_future(bench.session.withdraw())
    await turns()
    await bench.instances.lost("a")
    await leaving


async def test_a_call_follows_its_request_to_where_its_instance_has_sent_it() -> None:
    bench = Bench()
    answer = await bench.generate()
    bench.peers["a"].answer("generate", Generated(moved="b"))
    await turns()
    bench.peers["b"].answer("generate", Generated(completion=ANSWER))
    assert await answer is ANSWER
    (_, first), (_, second) = bench.peers["a"].asked + bench.peers["b"].asked
    assert second.request.request_id == first.request.request_id
    again = await bench.generate()
    bench.peers["b"].answer("generate", Generated(completion=ANSWER))
    assert await again is ANSWER, "what the episode asks next"


async def test_a_call_to_an_instance_that_left_is_found_where_its_request_had_moved() -> None:
    bench = Bench()
    answer = await bench.generate()
    await bench.instances.lost("a")
    await turns()
    ((_, asked),) = bench.peers["controller"].asked
    assert (asked.instance, asked.attempt) == ("a", 0)
    bench.peers["controller"].answer("place", Placement(instance="b", attempt=0))
    await turns()
    bench.peers["b"].answer("generate", Generated(completion=ANSWER))
    assert await answer is ANSWER
    (_, first), (_, second) = bench.peers["a"].asked + bench.peers["b"].asked
    assert second.request.request_id == first.request.request_id


async def test_a_request_that_moved_is_made_again_from_its_prompt_when_its_new_instance_is_lost() -> None:
    bench = Bench()
    bench.peers["c"] = Peer("c")
    answer = await bench.generate()
    bench.peers["a"].answer("generate", Generated(moved="b"))
    await turns()
    await bench.instances.lost("b")
    await turns()
    bench.peers["controller"].answer("place", Placement(instance="c", attempt=1))
    await turns()
    bench.peers["c"].answer("generate", Generated(completion=ANSWER))
    assert await answer is ANSWER


async def test_an_episode_that_neither_asks_for_tokens_nor_ends_is_ended_and_named() -> None:
    bench = Bench()
    with pytest.raises(DeadlineError, match=r"episode of task 'x' did nothing for 0\.01 s") as told:
        async with bench.own_time.bounded("the episode of task 'x'"):
            await asyncio.Event().wait()
    assert "episode_deadline" in told.value.fix


async def test_what_an_episode_waits_for_tokens_is_not_its_own_time() -> None:
    """Instances may have weights to load, or others' requests to end first."""
    bench = Bench()
    async with bench.own_time.bounded("the episode"):
        answers = [await bench.generate(), await bench.generate()]
        for answer in answers:
            assert not bench.own_time.runs
            bench.peers["a"].answer("generate", Generated(completion=ANSWER))
            await answer
        assert bench.own_time.runs, "of several calls when the last is answered"


async def test_the_time_begins_anew_with_each_answer() -> None:
    bench = Bench()

    async def episode() -> None:
        async with bench.own_time.bounded("the episode"):
            answer = await bench.generate()
            bench.peers["a"].answer("generate", Generated(completion=ANSWER))
            await answer
            await asyncio.Event().wait()

    with pytest.raises(DeadlineError):
        await episode()


async def test_a_timeout_of_the_environment_itself_stays_its_own() -> None:
    with pytest.raises(TimeoutError) as raised:
        async with OwnTime(60.0).bounded("the episode"):
            raise TimeoutError("of a tool")
    assert str(raised.value) == "of a tool"


@pytest.mark.parametrize("greedy", [True, False])
async def test_a_greedy_member_of_a_group_decodes_greedily(greedy: bool) -> None:
    bench = Bench(greedy=greedy)
    answer = await bench.generate()
    bench.peers["a"].answer("generate", Generated(completion=ANSWER))
    assert await answer is ANSWER
    ((_, call),) = bench.peers["a"].asked
    assert call.request.sampling.greedy == greedy
