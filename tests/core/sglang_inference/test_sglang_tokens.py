"""Requests and replies in SGLang's words, without SGLang."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from headrace.contract import VersionSpan
from headrace.errors import EngineError
from headrace.testing.suites.serving import request
from headrace_sglang.tokens import Answer, fresh_tokens, generate_body, logprob_body, sampling_parameters

PROMPT = np.array([5, 6, 7], np.int32)


def entries(*tokens: int) -> list[list[Any]]:
    return [[-token / 10, token, None] for token in tokens]


def reply(count: int, drawn: list[list[Any]], *, reason: str | None = None, spans: Any = None) -> dict[str, Any]:
    told: dict[str, Any] = {"completion_tokens": count, "output_token_logprobs": drawn, "finish_reason": None}
    if reason is not None:
        told |= {"finish_reason": {"type": reason}, "weight_versions": spans or [span(3, 0, count)]}
    return {"meta_info": told}


def span(version: int, start: int, end: int) -> dict[str, Any]:
    return {"version": str(version), "start": start, "end": end}


def test_a_request_asks_for_its_own_draws_and_nothing_else_stops_it() -> None:
    asked = request("a", PROMPT, version=3, seed=2**62, temperature=0.7, max_new_tokens=20, stop_token_ids=(9,))
    body = generate_body(asked, name="a", context=16)
    assert body["input_ids"] == [5, 6, 7]
    assert body["sampling_params"] == {
        "temperature": 0.7,
        "max_new_tokens": 13,
        "sampling_seed": 2**62,
        "stop_token_ids": [9],
    }
    assert body["extra_key"] != generate_body(request("a", PROMPT, version=4), name="a", context=16)["extra_key"]


def test_a_greedy_request_keeps_its_temperature() -> None:
    body = generate_body(request("a", PROMPT, greedy=True, temperature=0.7), name="a", context=16)
    assert (body["sampling_params"]["top_k"], body["sampling_params"]["temperature"]) == (1, 0.7)


def test_a_temperature_that_sglang_takes_for_another_is_refused() -> None:
    with pytest.raises(ValueError, match="at temperatures from 1e-06 on, got 1e-07"):
        sampling_parameters(1e-7)


def test_a_given_token_is_scored_as_one_that_could_have_been_drawn() -> None:
    body = logprob_body([5, 6], 7, version=3, temperature=0.7, name="score")
    assert (body["token_ids_logprob"], body["sampling_params"]["temperature"]) == ([7], 0.7)


def test_pieces_of_an_answer_are_told_with_the_versions_that_sglang_reports_at_the_end() -> None:
    answer = Answer(request("a", PROMPT, version=3, stream=True))
    first = answer.output(reply(2, entries(8, 9)))
    last = answer.output(reply(3, entries(4), reason="stop"))
    assert (first.token_ids.tolist(), last.token_ids.tolist(), last.finish_reason) == ([8, 9], [4], "stop")
    assert first.logprobs.tolist() == pytest.approx([-0.8, -0.9])
    assert [*first.spans, *last.spans] == [
        VersionSpan(version=3, start=0, stop=2),
        VersionSpan(version=3, start=2, stop=3),
    ]


def test_an_answer_of_several_versions_is_told_as_sglang_reports_it() -> None:
    answer = Answer(request("a", PROMPT, version=3))
    told = answer.output(reply(3, entries(8, 9, 4), reason="length", spans=[span(3, 0, 2), span(4, 2, 3)]))
    assert [(each.version, each.start, each.stop) for each in told.spans] == [(3, 0, 2), (4, 2, 3)]


def test_streamed_tokens_of_another_version_than_the_request_are_an_error() -> None:
    answer = Answer(request("a", PROMPT, version=3, stream=True))
    answer.output(reply(1, entries(8)))
    with pytest.raises(EngineError, match="pinned to version 3; SGLang reports"):
        answer.output(reply(2, entries(9), reason="length", spans=[span(4, 0, 2)]))


@pytest.mark.parametrize("spans", [[span(3, 0, 1)], [span(3, 1, 2)], [{"version": "default", "start": 0, "end": 2}]])
def test_versions_that_do_not_cover_the_tokens_are_an_error(spans: list[dict[str, Any]]) -> None:
    with pytest.raises(EngineError, match=r"SGLang (reported the weight versions|labels its weights 'default')"):
        Answer(request("a", PROMPT, version=3)).output(reply(2, entries(8, 9), reason="stop", spans=spans))


@pytest.mark.parametrize(
    ("count", "drawn", "start", "expected"),
    [
        (2, entries(8, 9), 0, [8, 9]),
        (4, entries(4, 5), 2, [4, 5]),
        (3, entries(8, 9, 4), 3, []),  # an abort in the queue tells all of them again
        (3, entries(4, 8, 9, 4), 2, [4]),  # … after those that had not been told
        (0, [], 0, []),
    ],
)
def test_tokens_are_told_once(count: int, drawn: list[list[Any]], start: int, expected: list[int]) -> None:
    told = {"completion_tokens": count, "output_token_logprobs": drawn}
    assert [token for _, token, _ in fresh_tokens(told, start)] == expected


def test_a_token_without_a_log_prob_is_an_error() -> None:
    with pytest.raises(EngineError, match="1 log-probs for 2 tokens"):
        fresh_tokens({"completion_tokens": 3, "output_token_logprobs": entries(8)}, 1)


@pytest.mark.parametrize("reason", [{"type": "stop_str"}, {"type": "abort", "message": "too long", "status_code": 400}])
def test_an_end_that_no_request_asks_for_is_an_error(reason: dict[str, Any]) -> None:
    told = reply(1, entries(8), reason="stop")
    told["meta_info"]["finish_reason"] = reason
    with pytest.raises(EngineError, match="SGLang ended a request by"):
        Answer(request("a", PROMPT, version=3)).output(told)
