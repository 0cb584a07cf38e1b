"""Answers that go on under another version in the middle, at a rollout node with a server of its own."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.contract import Completion, Interruption
from headrace.errors import EngineError, HeadraceError
from headrace.services.messages import LoadCall, VersionCall, VersionLoaded
from headrace.services.request_messages import Generated, SwitchCall, Switched
from headrace.wire import Network
from support.instances import PROMPT, TOKENS, Instance, asking, begun, until
from support.published import Published

RECOMPUTE, KEEP = Interruption(), Interruption(keep_kv=True)
Start = Callable[..., Any]


@pytest.fixture
def published(tmp_path: Path) -> Published:
    return Published(tmp_path)


@pytest.fixture
async def start(tmp_path: Path, published: Published) -> AsyncIterator[Start]:
    """``await start(settings)``: an instance that serves version 0."""
    started: list[Instance] = []

    async def begin(**settings: Any) -> Instance:
        network = Network.create(str(tmp_path))
        started.append(instance := Instance("rollout-0", tmp_path, network, settings, publisher=published.address))
        await instance.start(network)
        await instance.ask("load_version", LoadCall(version=0, probe=None), VersionLoaded)
        return instance

    yield begin
    for instance in started:
        await instance.close()


async def load(instance: Instance, version: int, interruption: Interruption = RECOMPUTE) -> None:
    await instance.ask("load_version", LoadCall(version=version, probe=None, interruption=interruption), VersionLoaded)


async def switch(instance: Instance, version: int, interruption: Interruption = RECOMPUTE) -> Switched:
    call = SwitchCall(version=version, interruption=interruption)
    switched: Switched = await instance.ask("switch_version", call, Switched)
    return switched


async def interrupt(instance: Instance, version: int, interruption: Interruption = RECOMPUTE) -> Switched:
    """In the middle of what it decodes."""
    await load(instance, version, interruption)
    switched = await switch(instance, version, interruption)
    instance.decodes.set()
    return switched


async def completed(answer: asyncio.Task[Generated]) -> Completion:
    completion = (await answer).completion
    assert completion is not None
    return completion


def spans(completion: Completion) -> list[tuple[int, int, int]]:
    return [(s.version, s.start, s.stop) for s in completion.spans]


@pytest.mark.parametrize("live_versions", [1, 2])
@pytest.mark.parametrize(
    ("migrates", "interruption", "kept"), [(True, KEEP, True), (True, RECOMPUTE, False), (False, RECOMPUTE, False)]
)
async def test_an_interrupted_answer_keeps_its_prefix_and_each_token_the_log_prob_of_its_version(
    start: Start, published: Published, live_versions: int, migrates: bool, interruption: Interruption, kept: bool
) -> None:
    instance = await start(live_versions=live_versions, kv_migration=migrates)
    answer = await begun(instance, asking(version=0))
    before, known = await instance.prefilled(), instance.engine._generated
    switched = await interrupt(instance, 1, interruption)
    completion = await completed(answer)
    (trajectory, attempt, tokens) = switched.interrupted[0]
    assert (trajectory, attempt, tokens >= 3) == (7, 0, True)
    assert tokens == known
    assert spans(completion) == [(0, 0, tokens), (1, tokens, TOKENS)]
    assert len(completion.token_ids) == TOKENS
    assert completion.logprobs.tolist() == pytest.approx(published.logprobs(completion), abs=1e-6)
    again = 0 if kept else len(PROMPT) + tokens
    assert (switched.prefilled_tokens, await instance.prefilled() - before) == (again, again)


@pytest.mark.parametrize("migrates", [True, False])
async def test_an_answer_is_interrupted_again_and_again(start: Start, published: Published, migrates: bool) -> None:
    instance = await start(live_versions=2, kv_migration=migrates)
    answer = await begun(instance, asking(version=0))
    await load(instance, 1)
    first = await switch(instance, 1)
    await instance.ask("retire_version", VersionCall(version=0), None)
    before = instance.engine._generated
    instance.decodes.set()
    await until(lambda: instance.engine._generated >= before + 3)
    instance.decodes.clear()
    second = await interrupt(instance, 2)
    completion = await completed(answer)
    (_, _, one), (_, _, two) = first.interrupted[0], second.interrupted[0]
    assert 0 < one < two < TOKENS
    assert spans(completion) == [(0, 0, one), (1, one, two), (2, two, TOKENS)]
    assert completion.logprobs.tolist() == pytest.approx(published.logprobs(completion), abs=1e-6)


async def test_what_comes_later_under_an_older_version_is_answered_by_the_newer_one(start: Start) -> None:
    instance = await start(live_versions=2)
    await interrupt(instance, 1)
    await instance.ask("retire_version", VersionCall(version=0), None)
    completion = (await instance.ask("generate", asking(version=0))).completion
    assert spans(completion) == [(1, 0, TOKENS)]


async def test_held_out_answers_are_not_interrupted(start: Start) -> None:
    instance = await start(live_versions=2)
    pinned = msgspec.structs.replace(asking("pinned", version=0), movable=False)
    answer = await begun(instance, pinned)
    switched = await interrupt(instance, 1)
    assert switched.interrupted == []
    assert spans(await completed(answer)) == [(0, 0, TOKENS)]


async def test_what_has_not_begun_is_not_interrupted_and_begins_under_the_newer_version(start: Start) -> None:
    instance = await start(live_versions=2, slots=1)
    first = await begun(instance, asking("first", 1, version=0))
    second = asyncio.create_task(instance.ask("generate", asking("second", 2, version=0)))
    await until(lambda: "second" in instance.engine._open)
    switched = await interrupt(instance, 1)
    assert [trajectory for trajectory, _, _ in switched.interrupted] == [1]
    assert len(spans(await completed(first))) == 2
    assert spans(await completed(second)) == [(1, 0, TOKENS)]


async def test_an_engine_with_room_for_one_version_lets_go_until_it_has_switched(start: Start) -> None:
    instance = await start(live_versions=1)
    answer = await begun(instance, asking(version=0))
    await load(instance, 1)
    instance.decodes.set()
    assert (await instance.service.health(None)).versions == (1,)
    assert not instance.engine._open, "nothing is decoded before the controller has verified the version"
    late = asyncio.create_task(instance.ask("generate", asking("late", 8, version=0)))
    switched = await switch(instance, 1)
    ((_, _, tokens),) = switched.interrupted
    assert spans(await completed(answer)) == [(0, 0, tokens), (1, tokens, TOKENS)]
    assert spans(await completed(late)) == [(1, 0, TOKENS)]


async def test_a_version_that_cannot_be_committed_interrupts_nothing(start: Start) -> None:
    instance = await start(live_versions=1)
    answer = await begun(instance, asking(version=0))
    instance.decodes.set()
    with pytest.raises(EngineError, match="version 9 is incomplete"):
        await load(instance, 9)
    assert spans(await completed(answer)) == [(0, 0, TOKENS)]


async def test_an_answer_that_is_given_up_while_it_is_held_does_not_go_on(start: Start) -> None:
    instance = await start(live_versions=1)
    call = asking(version=0)
    answer = asyncio.create_task(instance.service.generate(call))
    await until(lambda: instance.engine._generated >= 3)
    instance.decodes.clear()
    await load(instance, 1)
    answer.cancel()
    await asyncio.wait({answer})
    assert (await switch(instance, 1)).prefilled_tokens == 0
    assert not instance.engine._open


@pytest.mark.parametrize("migrates", [True, False])
async def test_a_load_that_is_given_up_while_requests_are_taken_out_leaves_all_of_them_as_they_were(
    start: Start, monkeypatch: pytest.MonkeyPatch, migrates: bool
) -> None:
    instance = await start(live_versions=1, kv_migration=migrates)
    answers = [await begun(instance, asking("early", 1, version=0))]
    answers.append(asyncio.create_task(instance.ask("generate", asking("late", 2, version=0))))
    await until(lambda: "late" in instance.engine._open)
    requests, may_be_taken = instance.service._requests, asyncio.Event()
    take, taken = requests.take, []

    async def slow(pending: Any, **named: Any) -> Any:
        if pending.request.request_id == "late":
            await may_be_taken.wait()
        taken.append(await take(pending, **named))
        return taken[-1]

    monkeypatch.setattr(requests, "take", slow)
    loading = asyncio.create_task(
        instance.service.load_version(LoadCall(version=1, probe=None, interruption=RECOMPUTE))
    )
    await until(lambda: bool(taken))
    for _ in range(2):  # its deadline, and the word of the caller that gives up for the same reason
        loading.cancel()
        await asyncio.sleep(0)
    may_be_taken.set()
    await asyncio.wait({loading})
    assert loading.cancelled()
    instance.decodes.set()
    for answer in answers:
        assert spans(await completed(answer)) == [(0, 0, TOKENS)]
    assert (await instance.service.health(None)).versions == (0,)
    await interrupt(instance, 1)  # as if nothing had been
    assert spans((await instance.ask("generate", asking("next", 3, version=1))).completion) == [(1, 0, TOKENS)]


class SlowTakes:
    """Requests come out of an instance's engine as soon as ``free`` is set."""

    def __init__(self, instance: Instance, monkeypatch: pytest.MonkeyPatch) -> None:
        self.free, self.asked = asyncio.Event(), 0
        self._take = instance.service._requests.take
        monkeypatch.setattr(instance.service._requests, "take", self._slow)

    async def _slow(self, pending: Any, **named: Any) -> Any:
        self.asked += 1
        await self.free.wait()
        return await self._take(pending, **named)


@pytest.mark.parametrize("given_up", [2, 1], ids=["both", "one"])
async def test_of_two_that_wait_for_the_same_requests_to_come_out_each_may_give_up(
    start: Start, monkeypatch: pytest.MonkeyPatch, given_up: int
) -> None:
    instance = await start(live_versions=2)
    answer = await begun(instance, asking(version=0))
    await load(instance, 1)
    takes = SlowTakes(instance, monkeypatch)
    # Not over the wire, where the word that a caller has given up may come after the switch.
    call = SwitchCall(version=1, interruption=RECOMPUTE)
    waiting = [asyncio.create_task(instance.service.switch_version(call)) for _ in range(2)]
    await until(lambda: takes.asked > 0)
    for given in waiting[:given_up]:
        given.cancel()
    await asyncio.sleep(0)
    takes.free.set()
    await asyncio.wait(waiting)
    assert [given.cancelled() for given in waiting] == [True, given_up == 2]
    instance.decodes.set()
    versions = [version for version, _, _ in spans(await completed(answer))]
    assert versions == ([0] if given_up == 2 else [0, 1])


async def test_of_two_switches_at_once_the_later_waits_and_all_go_on_under_its_version(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    instance = await start(live_versions=3)
    answer = await begun(instance, asking(version=0))
    await load(instance, 1)
    await load(instance, 2)
    takes = SlowTakes(instance, monkeypatch)
    waiting = [asyncio.create_task(switch(instance, version)) for version in (1, 2)]
    await until(lambda: takes.asked > 0)
    takes.free.set()
    switched = [await given for given in waiting]
    instance.decodes.set()
    ((_, _, tokens),) = switched[0].interrupted
    assert switched[1].interrupted == switched[0].interrupted, "nothing was decoded in between"
    assert spans(await completed(answer)) == [(0, 0, tokens), (2, tokens, TOKENS)]


async def test_a_switch_waits_for_the_commit_that_requests_are_out_for(start: Start) -> None:
    instance = await start(live_versions=1)
    answer = await begun(instance, asking(version=0))
    holds, may_commit, committing = instance.service._interruptions, asyncio.Event(), asyncio.Event()

    async def commit() -> None:
        committing.set()
        await may_commit.wait()
        raise EngineError("no room")

    loading = asyncio.create_task(holds.change(RECOMPUTE, commit))
    await committing.wait()
    switching = asyncio.create_task(holds.switch(0, RECOMPUTE))
    await asyncio.sleep(0)
    assert not instance.engine._open, "all are out as long as the version is being replaced"
    may_commit.set()
    with pytest.raises(EngineError, match="no room"):
        await loading
    await switching
    instance.decodes.set()
    assert spans(await completed(answer)) == [(0, 0, TOKENS)]


async def test_a_version_that_is_loaded_again_before_the_switch_finds_the_requests_held(start: Start) -> None:
    instance = await start(live_versions=1)
    answer = await begun(instance, asking(version=0))
    await load(instance, 1)
    await load(instance, 1)
    switched = await switch(instance, 1)
    instance.decodes.set()
    ((_, _, tokens),) = switched.interrupted
    assert spans(await completed(answer)) == [(0, 0, tokens), (1, tokens, TOKENS)]


@pytest.mark.parametrize("error", [EngineError("no room"), ValueError("no room")], ids=["told", "a bug"])
@pytest.mark.parametrize("fails", ["take", "go_on"])
async def test_an_answer_that_cannot_go_on_fails_alone(
    start: Start, monkeypatch: pytest.MonkeyPatch, fails: str, error: Exception
) -> None:
    instance = await start(live_versions=2)
    lucky = await begun(instance, asking("lucky", 2, version=0))
    unlucky = asyncio.create_task(instance.ask("generate", asking("unlucky", 1, version=0)))
    await until(lambda: "unlucky" in instance.engine._open)
    requests = instance.service._requests
    own = getattr(requests, fails)

    async def failing(pending: Any, *rest: Any, **named: Any) -> Any:
        if pending.request.request_id == "unlucky":
            raise error
        return await own(pending, *rest, **named)

    monkeypatch.setattr(requests, fails, failing)
    await interrupt(instance, 1)
    with pytest.raises(HeadraceError, match="no room"):
        await unlucky
    assert len(spans(await completed(lucky))) == 2
