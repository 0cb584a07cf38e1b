"""Requests that move between two rollout instances, each with a server of its own in this process."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.contract import Completion
from headrace.errors import EngineError, HeadraceError
from headrace.services import moves
from headrace.services.messages import VersionCall
from headrace.services.request_messages import CarryCall, Generated, MoveCall, Moved, Offered
from headrace.services.rollout import BASE_VERSION
from headrace.testing import FakeTrainingEngine
from headrace.wire import Network
from support.instances import PROMPT, TOKENS, Instance, asking, begun, until

Pair = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Private, with a model in it."""
    tmp_path.chmod(0o700)
    FakeTrainingEngine.create_model(str(tmp_path / "model"), settings={}, seed=3)
    return tmp_path


@pytest.fixture
async def pair(folder: Path) -> AsyncIterator[Pair]:
    """``await pair(source settings, target settings)``: two instances of the same weights."""
    network = Network.create(str(folder))
    started: list[Instance] = []

    async def start(*settings: dict[str, Any]) -> list[Instance]:
        for number, chosen in enumerate(settings):
            started.append(Instance(f"rollout-{number}", folder, network, chosen))
            await started[-1].start(network)
        return started

    yield start
    for instance in started:
        await instance.close()


async def move(source: Instance, target: Instance, *, trajectory: int = 7, attempt: int = 0) -> Moved:
    call = MoveCall(trajectory=trajectory, attempt=attempt, version=BASE_VERSION, target=target.address)
    try:
        moved: Moved = await source.ask("move", call, reply=Moved)
    finally:
        source.decodes.set()
    return moved


def same(one: Completion | None, other: Completion | None) -> bool:
    assert one is not None
    assert other is not None
    return (one.token_ids.tolist(), one.logprobs.tolist(), one.spans) == (
        other.token_ids.tolist(),
        other.logprobs.tolist(),
        other.spans,
    )


async def test_DORA8_a_moved_request_goes_on_as_if_it_had_not_and_prefills_nothing(pair: Pair) -> None:
    source, target = await pair({}, {})
    unmoved = await source.ask("generate", asking("unmoved"))
    before = await target.prefilled()
    answer = await begun(source, asking())
    moved = await move(source, target)
    assert await answer == Generated(moved=target.address)
    followed = await target.ask("generate", asking())
    assert same(followed.completion, unmoved.completion)
    assert await target.prefilled() == before
    assert (moved.prefilled_tokens, moved.tokens > len(PROMPT), moved.nbytes > 0) == (0, True, True)
    assert not source.engine._open


@pytest.mark.parametrize("able", [(True, False), (False, True), (False, False)], ids=["to", "from", "between"])
async def test_engines_that_cannot_hand_over_keys_and_values_prefill_again_and_keep_the_prefix(
    pair: Pair, able: tuple[bool, bool]
) -> None:
    source, target = await pair(*({"kv_migration": it} for it in able))
    unmoved = (await source.ask("generate", asking("unmoved"))).completion
    answer = await begun(source, asking())
    moved = await move(source, target)
    assert (await answer).moved == target.address
    followed = (await target.ask("generate", asking())).completion
    prefix = moved.tokens - len(PROMPT)
    assert prefix > 0
    assert followed.token_ids[:prefix].tolist() == unmoved.token_ids[:prefix].tolist()
    assert len(followed.token_ids) == len(followed.logprobs) == TOKENS
    assert [(s.version, s.start, s.stop) for s in followed.spans] == [(BASE_VERSION, 0, TOKENS)]
    assert (moved.prefilled_tokens, moved.nbytes) == (moved.tokens, 0)
    assert (followed.token_ids.tolist() == unmoved.token_ids.tolist()) == able[1], "its draws go on, or new ones begin"


@pytest.mark.parametrize("able", [True, False])
@pytest.mark.parametrize("lost", ["carry", "reply"])
async def test_a_move_that_fails_half_way_loses_nothing(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, able: bool, lost: str
) -> None:
    source, target = await pair({"kv_migration": able}, {"kv_migration": able})
    monkeypatch.setattr(moves, "UNASKED_SECONDS", 0.05)
    carry = target.service._moves.carry

    async def failing(call: CarryCall) -> int:
        if lost == "reply":
            await carry(call)
        raise EngineError("the target is gone")

    monkeypatch.setattr(target.service._moves, "carry", failing)
    monkeypatch.setattr(source.service._moves, "_client", lambda address: Straight(target))
    answer = await begun(source, asking())
    with pytest.raises(EngineError, match="gone"):
        await move(source, target)
    completion = (await answer).completion
    assert completion is not None
    assert len(completion.token_ids) == TOKENS
    await until(lambda: not target.engine._open)  # what went on there as well ends: nobody asks for it


@pytest.mark.parametrize("able", [True, False])
async def test_a_request_whose_target_gives_its_version_up_while_it_travels_goes_on_at_the_source(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, able: bool
) -> None:
    source, target = await pair({"kv_migration": able}, {"kv_migration": able})
    unmoved = await source.ask("generate", asking("unmoved"))
    take = source.service._requests.take

    async def overtaken(*arguments: Any, **named: Any) -> Any:
        state = await take(*arguments, **named)
        await target.service.retire_version(VersionCall(version=BASE_VERSION))
        return state

    monkeypatch.setattr(source.service._requests, "take", overtaken)
    answer = await begun(source, asking())
    with pytest.raises(HeadraceError, match="asks for version"):
        await move(source, target)
    completion = (await answer).completion
    assert completion is not None
    assert len(completion.token_ids) == TOKENS
    assert same(completion, unmoved.completion) == able
    assert not target.engine._open
    assert target.service._requests.get("r") is None
    assert source.service._moves.sent_on(7, 0) == ""


class Straight:
    """A client that calls the instance's methods."""

    def __init__(self, instance: Instance) -> None:
        self._moves = instance.service._moves

    async def call(self, method: str, request: Any, **_: Any) -> Any:
        return await getattr(self._moves, method)(request)


async def test_a_target_that_does_not_serve_the_version_refuses_before_anything_is_taken_out(pair: Pair) -> None:
    source, target = await pair({}, {})
    await target.engine.retire(BASE_VERSION)
    answer = await begun(source, asking())
    taken: list[object] = []
    source.service._requests.take = taken.append  # type: ignore[assignment,method-assign]
    with pytest.raises(HeadraceError, match=f"version {BASE_VERSION} is not served"):
        await move(source, target)
    assert taken == []
    assert (await answer).completion is not None


async def test_other_weights_are_told_apart_by_the_offer_and_nothing_is_sent_for_them(
    pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, target = await pair({}, {})
    monkeypatch.setattr(target.engine, "fingerprint", lambda version: "of another model")
    answer = await begun(source, asking())
    moved = await move(source, target)
    assert (await answer).moved == target.address
    assert (moved.nbytes, moved.prefilled_tokens) == (0, moved.tokens)
    assert (await target.ask("generate", asking())).completion is not None


async def test_a_request_that_moved_is_of_the_try_that_it_was_of(pair: Pair) -> None:
    source, target = await pair({}, {})
    answer = await begun(source, asking())
    target.decodes.clear()
    await move(source, target, attempt=2)
    assert (await answer).moved == target.address
    arrived = target.service._requests.get("r")
    assert arrived is not None
    assert arrived.attempt == 2
    target.decodes.set()


async def test_a_trajectory_that_waits_for_nothing_is_sent_on_with_its_next_request(pair: Pair) -> None:
    source, target = await pair({}, {})
    assert await move(source, target) == Moved()
    assert await source.ask("generate", asking()) == Generated(moved=target.address)
    assert await source.ask("generate", asking("other", trajectory=8)) != Generated(moved=target.address)
    assert await move(target, source) == Moved()
    assert (await source.ask("generate", asking("back"))).completion is not None


async def test_a_request_that_may_not_move_stays(pair: Pair) -> None:
    source, target = await pair({}, {})
    answer = await begun(source, msgspec.structs.replace(asking(), movable=False))
    assert await move(source, target) == Moved()
    assert (await answer).completion is not None


async def test_a_version_is_free_at_the_source_as_soon_as_its_request_has_moved(pair: Pair) -> None:
    source, target = await pair({}, {})
    answer = await begun(source, asking())
    await move(source, target)
    await source.service.retire_version(VersionCall(version=BASE_VERSION))
    assert (await answer).moved == target.address
    assert (await target.ask("generate", asking())).completion is not None


async def test_a_request_that_nobody_waits_for_any_more_does_not_move(pair: Pair) -> None:
    source, target = await pair({}, {})
    answer = await begun(source, asking())
    answer.cancel()
    await asyncio.gather(answer, return_exceptions=True)
    await until(lambda: source.service._requests.movable(7, BASE_VERSION) is None)
    assert await move(source, target) == Moved()
    assert not target.engine._open


async def test_a_request_that_nobody_asked_for_in_time_begins_anew(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(moves, "UNASKED_SECONDS", 0.0)
    source, target = await pair({}, {})
    unmoved = await source.ask("generate", asking("unmoved"))
    answer = await begun(source, asking())
    target.decodes.clear()
    await move(source, target)
    assert (await answer).moved == target.address
    await until(lambda: target.service._requests.get("r") is None)
    target.decodes.set()
    assert same((await target.ask("generate", asking())).completion, unmoved.completion)


async def test_a_request_moves_twice_and_its_caller_follows_both_times(pair: Pair) -> None:
    source, middle, target = await pair({}, {}, {})
    unmoved = await source.ask("generate", asking("unmoved"))
    answer = await begun(source, asking())
    middle.decodes.clear()  # or it may be faster than the second move
    await move(source, middle)
    await move(middle, target)
    assert (await answer).moved == middle.address
    assert (await middle.ask("generate", asking())).moved == target.address
    followed = await target.ask("generate", asking())
    assert same(followed.completion, unmoved.completion)


async def test_an_offer_says_whether_keys_and_values_are_of_use(pair: Pair) -> None:
    source, target = await pair({"kv_migration": False}, {})
    call = MoveCall(trajectory=1, attempt=0, version=BASE_VERSION, target=target.address)
    assert await source.service._moves._offer(call) == Offered(with_kv=False)
