"""Memory for keys and values that is bounded: what does not fit waits in host memory, and is not computed again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from headrace.contract.generation import GenerationOutput, RequestState
from headrace.errors import EngineError
from headrace_torch.checkpoint import load_model
from headrace_torch.decode.scheduler import Scheduler
from headrace_torch.inference import TorchInferenceSettings

MAX_LENGTH = 512
Schedule = Callable[..., Scheduler]


@pytest.fixture
def schedule(make_model: Any) -> Schedule:
    """A scheduler that serves versions 0 and 1, of other weights each."""

    def make(*, slots: int = 8, kv_tokens: int | None = None) -> Scheduler:
        scheduler = Scheduler(slots=slots, max_length=MAX_LENGTH, kv_tokens=kv_tokens)
        for version in (0, 1):
            path = make_model(version, max_position_embeddings=MAX_LENGTH)
            scheduler.install(version, load_model(path, dtype=torch.float32, device="cpu"))
        return scheduler

    return make


def allocated(scheduler: Scheduler) -> int:
    return sum(batch.arena.shape.tokens for batch in scheduler._batches.values())


def drain(scheduler: Scheduler) -> list[GenerationOutput]:
    """All outputs; at no time is there more memory than allowed."""
    outputs = []
    while not scheduler.idle:
        outputs += scheduler.step()
        assert allocated(scheduler) <= (scheduler._kv_tokens or float("inf"))
        assert 0 <= scheduler.kv_used <= 1
    return outputs


def requests(request_for: Any, prompts: Any, *, count: int = 8, versions: int = 2) -> list[RequestState]:
    """Of 2 to 9 times 50 tokens, under both versions in turn."""
    return [
        RequestState.unbegun(
            request_for(
                i, prompt, version=i % versions, max_new_tokens=100 + (i * 150) % 400, seed=i, stream=i % 3 == 0
            )
        )
        for i, prompt in enumerate(prompts(count))
    ]


@pytest.mark.parametrize("kv_tokens", [MAX_LENGTH, 2 * MAX_LENGTH])
def test_what_was_parked_goes_on_token_for_token_and_nothing_is_computed_again(
    schedule: Schedule, request_for: Any, prompts: Any, join: Any, kv_tokens: int
) -> None:
    """Log-probs may differ in the last bits, as products of matrices do that have other numbers of rows."""
    ample, tight = schedule(), schedule(kv_tokens=kv_tokens)
    ample.submit(requests(request_for, prompts))
    tight.submit(requests(request_for, prompts))
    expected, found = join(drain(ample)), join(drain(tight))
    assert tight.parked > 0
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert found[name].tokens == answer.tokens, name
        assert found[name].logprobs == pytest.approx(answer.logprobs, abs=1e-5), name
        assert (found[name].reason, len(found[name].tokens)) == (
            answer.reason,
            sum(s.stop - s.start for s in answer.spans),
        )
        assert {span.version for span in found[name].spans} == {int(name) % 2}
    assert tight.prefilled_tokens == ample.prefilled_tokens == sum(map(len, prompts(8)))


def test_parking_and_taking_back_changes_no_bit(schedule: Schedule, request_for: Any, prompts: Any, join: Any) -> None:
    """Here the same sequences run together with and without it."""
    unparked, parked = schedule(), schedule()
    for scheduler in (unparked, parked):
        scheduler.submit(requests(request_for, prompts, count=4, versions=1))
    expected, found = join(drain(unparked)), join([])
    for step in range(1000):
        join(parked.step(), found)
        if step % 10 == 9:
            batch = parked._batches[0]
            with torch.inference_mode():
                parked._waiting.extendleft([batch.park() for _ in range(batch.running)])
    assert found.keys() == expected.keys()
    for name, answer in expected.items():
        assert (found[name].tokens, found[name].logprobs) == (answer.tokens, answer.logprobs)
    assert parked.prefilled_tokens == unparked.prefilled_tokens


def test_where_there_is_room_nothing_is_parked(schedule: Schedule, request_for: Any, prompts: Any) -> None:
    scheduler = schedule(kv_tokens=8 * MAX_LENGTH)
    scheduler.submit(requests(request_for, prompts))
    drain(scheduler)
    assert scheduler.parked == 0


def test_the_youngest_of_the_newest_version_is_parked_and_joins_before_what_has_not_begun(
    schedule: Schedule, request_for: Any
) -> None:
    scheduler = schedule(slots=3, kv_tokens=MAX_LENGTH)
    names = {"old": (0, 40), "newer": (1, 20), "newest": (1, 10), "late": (1, 10)}
    scheduler.submit(
        [
            RequestState.unbegun(request_for(name, [1] * length, version=version, max_new_tokens=400, stream=True))
            for name, (version, length) in names.items()
        ]
    )
    parked: list[str] = []
    ended: list[str] = []
    while not scheduler.idle:
        outputs = scheduler.step()
        ended += [output.request_id for output in outputs if output.finish_reason is not None]
        begun = [state.request.request_id for state in scheduler._waiting if len(state.token_ids)]
        parked += [name for name in begun if name not in parked]
        assert [state.request.request_id for state in scheduler._waiting][: len(begun)] == begun
    assert "old" not in parked
    assert ended[0] == "old"
    assert ended[-1] == "late"


def test_what_is_parked_may_be_aborted_or_go_on_elsewhere(schedule: Schedule, request_for: Any, join: Any) -> None:
    def begun() -> Scheduler:
        scheduler = schedule(kv_tokens=3 * 192)
        scheduler.submit(
            [RequestState.unbegun(request_for(n, [n + 1] * 9, max_new_tokens=300, seed=n)) for n in range(4)]
        )
        while not any(len(state.token_ids) for state in scheduler._waiting):
            scheduler.step()
        return scheduler

    scheduler = begun()
    (name,) = [state.request.request_id for state in scheduler._waiting if len(state.token_ids)]
    aborted = join(scheduler.abort(frozenset({name})))[name]
    assert aborted.reason == "aborted"
    source, target = begun(), schedule()
    state = source.take(name, fingerprint="of these weights")
    assert state is not None
    assert (state.fingerprint, len(state.kv), state.token_ids.tolist()) == ("of these weights", 2, aborted.tokens)
    target.submit([state])
    unparked = schedule()
    unparked.submit([RequestState.unbegun(state.request)])
    assert join(drain(target))[name].tokens == join(drain(unparked))[name].tokens
    assert target.prefilled_tokens == 0


async def test_health_tells_how_often_and_the_share_of_the_memory_there_is(
    serve: Any, make_model: Any, request_for: Any
) -> None:
    async with serve(make_model(max_position_embeddings=MAX_LENGTH), slots=4, kv_tokens=MAX_LENGTH) as served:
        await served.generate(*(request_for(n, [n + 1] * 4, max_new_tokens=300) for n in range(4)))
        health = await served.engine.health()
    assert (health.parked > 0, health.prefilled_tokens, health.kv_used) == (True, 16, 0.0)


async def test_memory_for_less_than_one_sequence_is_refused(serve: Any, make_model: Any) -> None:
    with pytest.raises(ValueError, match="at least 64"):
        TorchInferenceSettings(max_length=64, kv_tokens=63)
    with pytest.raises(EngineError, match="less than one sequence of max_length 64"):
        async with serve(make_model(), kv_tokens=63):
            pass
