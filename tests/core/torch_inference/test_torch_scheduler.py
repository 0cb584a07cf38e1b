"""Continuous batching, step by step, without a thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract.generation import GenerationOutput, GenerationRequest, RequestState
from headrace.errors import EngineError
from headrace_torch.checkpoint import load_model
from headrace_torch.decode.rows import Rows
from headrace_torch.decode.scheduler import Scheduler
from headrace_torch.decode.worker import DecodeWorker

DEADLINE = 60.0


@pytest.fixture
def schedule(make_model: Any) -> Callable[..., Scheduler]:
    """A scheduler that serves version 0."""

    def make(*, slots: int, max_length: int = 64) -> Scheduler:
        scheduler = Scheduler(slots=slots, max_length=max_length)
        scheduler.install(0, load_model(make_model(), dtype=torch.float32, device="cpu"))
        return scheduler

    return make


def unbegun(requests: list[GenerationRequest]) -> list[RequestState]:
    return [RequestState.unbegun(request) for request in requests]


def drain(scheduler: Scheduler) -> list[list[GenerationOutput]]:
    """Outputs of every step until idle."""
    steps = []
    while not scheduler.idle:
        steps.append(scheduler.step())
    return steps


def test_a_finished_sequence_leaves_at_once_and_the_next_in_line_joins(schedule: Any, request_for: Any) -> None:
    scheduler = schedule(slots=2)
    budgets = {"a": 1, "b": 3, "c": 2, "d": 1, "e": 1}
    scheduler.submit(unbegun([request_for(n, [1, 2], max_new_tokens=b, stream=True) for n, b in budgets.items()]))
    running = [sorted(output.request_id for output in step) for step in drain(scheduler)]
    assert running == [["a", "b"], ["b", "c"], ["b", "c"], ["d", "e"]]
    assert scheduler.generated_tokens == 8


def test_slots_bound_all_versions_together(schedule: Any, request_for: Any, make_model: Any) -> None:
    scheduler = schedule(slots=3)
    scheduler.install(1, load_model(make_model(1), dtype=torch.float32, device="cpu"))
    scheduler.submit(
        unbegun([request_for(i, [1], version=i % 2, max_new_tokens=1 + i % 3, stream=True) for i in range(10)])
    )
    order: list[str] = []
    while not scheduler.idle:
        outputs = scheduler.step()
        assert len(outputs) <= 3
        order += sorted({o.request_id for o in outputs} - set(order))
    assert order == [str(i) for i in range(10)]


def test_prompts_beyond_the_step_budget_wait_for_the_next_step(
    schedule: Any, request_for: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_torch.decode.scheduler._PROMPT_TOKENS_PER_STEP", 10)
    scheduler = schedule(slots=8)
    scheduler.submit(unbegun([request_for(i, [1] * n, stream=True) for i, n in enumerate([12, 6, 4, 1])]))
    seen = [len(scheduler.step()) for _ in range(3)]
    assert seen == [1, 3, 4]


def test_a_stop_token_ends_the_response_and_is_part_of_it(schedule: Any, request_for: Any, join: Any) -> None:
    scheduler = schedule(slots=4)
    scheduler.submit(unbegun([request_for("free", [3, 4], max_new_tokens=20, seed=1)]))
    free = join([o for step in drain(scheduler) for o in step])["free"]
    stop = free.tokens[6]
    length = free.tokens.index(stop) + 1
    never = min(set(range(50)) - set(free.tokens))
    scheduler.submit(
        unbegun(
            [
                request_for("stopped", [3, 4], max_new_tokens=20, seed=1, stop_token_ids=(never, stop)),
                request_for("exact", [3, 4], max_new_tokens=length, seed=1, stop_token_ids=(stop,)),
                request_for("short", [3, 4], max_new_tokens=length - 1, seed=1, stop_token_ids=(stop,)),
            ]
        )
    )
    answers = join([o for step in drain(scheduler) for o in step])
    assert [answers[n].reason for n in ("stopped", "exact", "short")] == ["stop", "stop", "length"]
    assert answers["stopped"].tokens == answers["exact"].tokens == free.tokens[:length]
    assert answers["short"].tokens == free.tokens[: length - 1]


def test_removing_rows_moves_every_column_of_the_last_rows_into_the_holes(request_for: Any) -> None:
    rows = Rows(5, version=0, max_length=64)
    rows.append(unbegun([request_for(i, [1] * (i + 1), seed=i, temperature=1 + i, greedy=i == 4) for i in range(5)]))
    rows.record(np.arange(5), np.arange(5, dtype=np.float32))
    kept = {r.request_id: i for i, r in enumerate(rows.requests)}
    before = [column.copy() for column in rows._columns()]
    assert rows.remove([1, 3]) == ([4], [1])
    assert [r.request_id for r in rows.requests] == ["0", "4", "2"]
    for old, new in zip(before, rows._columns(), strict=True):
        for row, request in enumerate(rows.requests):
            assert np.array_equal(new[row], old[kept[request.request_id]])


def test_sequences_survive_growth_of_the_cache_and_moves_within_it(
    schedule: Any, request_for: Any, join: Any, make_model: Any, recompute: Any, prompts: Any
) -> None:
    scheduler = schedule(slots=20, max_length=128)
    path = make_model(0, max_position_embeddings=128)
    scheduler.install(0, load_model(path, dtype=torch.float32, device="cpu"))
    given = prompts(40)
    scheduler.submit(
        unbegun([request_for(i, p, max_new_tokens=1 + (i * 37) % 110, seed=i) for i, p in enumerate(given)])
    )
    answers = join([o for step in drain(scheduler) for o in step])
    for i, prompt in enumerate(given):
        answer = answers[str(i)]
        expected = recompute(path, np.concatenate([prompt, answer.tokens]))[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5, rtol=0, err_msg=str(i))


def test_abort_ends_running_and_waiting_requests_with_what_they_have(
    schedule: Any, request_for: Any, join: Any
) -> None:
    scheduler = schedule(slots=3)
    scheduler.submit(unbegun([request_for(n, [5], seed=7) for n in "abcd"]))
    scheduler.step()
    scheduler.step()
    aborted = join(scheduler.abort(frozenset({"a", "c", "d", "unknown"})))
    assert {n: (len(a.tokens), a.reason) for n, a in aborted.items()} == {
        "a": (2, "aborted"),
        "c": (2, "aborted"),
        "d": (0, "aborted"),
    }
    rest = join([o for step in drain(scheduler) for o in step])
    assert list(rest) == ["b"]
    assert rest["b"].tokens[:2] == aborted["a"].tokens == aborted["c"].tokens
    assert len(rest["b"].tokens) == 8


def test_weights_that_are_not_finite_stop_decoding_with_the_version_named(schedule: Any, request_for: Any) -> None:
    scheduler = schedule(slots=1)
    scheduler.submit(unbegun([request_for("a", [1])]))
    with torch.no_grad():
        scheduler._batches[0].model._norm.weight[3] = float("nan")
    with pytest.raises(EngineError, match="version 0") as caught:
        scheduler.step()
    assert caught.value.fix


def test_what_breaks_the_decode_thread_is_handed_on(schedule: Any) -> None:
    ended = threading.Event()
    failures: list[Exception | None] = []

    def closed(failure: Exception | None) -> None:
        failures.append(failure)
        ended.set()

    worker = DecodeWorker(schedule(slots=1), name="x", threads=1, deliver=lambda outputs: None, closed=closed)
    worker.start()
    worker.post(lambda scheduler: scheduler.retire(99))
    assert ended.wait(DEADLINE)
    assert isinstance(failures[0], KeyError)
    worker.stop()
