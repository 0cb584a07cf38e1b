"""Requests in vLLM's words and its replies in ours, without a vLLM."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.contract import GenerationRequest, Sampling, VersionSpan
from headrace.errors import EngineError
from headrace_vllm.names import TEMPERATURE
from headrace_vllm.tokens import Answer, chosen_logprobs, finish_reason, salt, sampling_arguments, version_of


def asked(*, prompt: int = 3, version: int = 4, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id="r",
        prompt=np.arange(prompt, dtype=np.int32),
        sampling=Sampling(**{"max_new_tokens": 5, **sampling}),
        version=version,
        stream=True,
    )


@dataclass
class Flat:
    """What vLLM's ``FlatLogprobs`` has."""

    token_ids: list[int]
    logprobs: list[float]
    start_indices: list[int]


@dataclass
class Completion:
    """What vLLM's ``CompletionOutput`` has."""

    token_ids: list[int]
    finish_reason: str | None = None
    weight_versions: list[Any] | None = None
    logprobs: Any = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.token_ids)
        self.logprobs = Flat(self.token_ids, [-0.5] * count, list(range(count)))


def reply(*token_ids: int, reason: str | None = None, spans: list[tuple[str, int, int]] | None = None) -> Any:
    versions = None if spans is None else [SimpleNamespace(version=v, start=a, end=b) for v, a, b in spans]
    return SimpleNamespace(outputs=[Completion(list(token_ids), reason, versions)])


def test_nothing_but_the_requests_own_tokens_and_budget_ends_it() -> None:
    arguments = sampling_arguments(asked(stop_token_ids=(7, 9), seed=2**63 - 1), context=100)
    assert arguments["stop_token_ids"] == [7, 9]
    assert (arguments["max_tokens"], arguments["seed"], arguments["ignore_eos"]) == (5, 2**63 - 1, True)


def test_the_context_bounds_the_budget() -> None:
    assert sampling_arguments(asked(prompt=6, max_new_tokens=50), context=10)["max_tokens"] == 4


@pytest.mark.parametrize("temperature", [0.05, 0.7, 1.0, 2.0])
def test_a_temperature_that_vllm_takes_is_its_own(temperature: float) -> None:
    arguments = sampling_arguments(asked(temperature=temperature), context=100)
    assert arguments["temperature"] == temperature
    assert "extra_args" not in arguments


@pytest.mark.parametrize("temperature", [0.001, 2.5, 50.0])
def test_a_temperature_that_vllm_refuses_divides_the_logits_before(temperature: float) -> None:
    arguments = sampling_arguments(asked(temperature=temperature), context=100)
    assert (arguments["temperature"], arguments["extra_args"]) == (1.0, {TEMPERATURE: temperature})


def test_greedy_log_probs_are_those_of_the_tempered_distribution() -> None:
    arguments = sampling_arguments(asked(temperature=0.7, greedy=True), context=100)
    assert (arguments["temperature"], arguments["extra_args"]) == (0.0, {TEMPERATURE: 0.7})
    assert "extra_args" not in sampling_arguments(asked(greedy=True), context=100)


def test_versions_do_not_share_keys_and_values() -> None:
    assert len({salt(version) for version in (-1, 0, 1, 11)}) == 4


@pytest.mark.parametrize(
    ("theirs", "ours"), [("stop", "stop"), ("length", "length"), ("abort", "aborted"), (None, None)]
)
def test_finish_reasons_are_translated(theirs: str | None, ours: str | None) -> None:
    assert finish_reason(theirs) == ours


def test_a_finish_reason_that_no_request_of_ours_can_have_is_an_error() -> None:
    with pytest.raises(EngineError, match=r"ended a request by 'error'"):
        finish_reason("error")


def test_log_probs_are_those_of_the_drawn_tokens() -> None:
    """vLLM may tell further tokens at each position; the drawn one comes first."""
    flat = Flat([5, 1, 6, 2], [-0.5, -0.1, -1.5, -0.2], [0, 2])
    dicts = [{1: SimpleNamespace(logprob=-0.1), 5: SimpleNamespace(logprob=-0.5)}, {6: SimpleNamespace(logprob=-1.5)}]
    for form in (flat, dicts):
        found = chosen_logprobs(form, [5, 6])
        assert found.dtype == np.float32
        assert found.tolist() == [-0.5, -1.5]


@pytest.mark.parametrize("logprobs", [None, [], Flat([5, 9], [-0.5, -0.5], [0, 1]), Flat([5], [-0.5], [0])])
def test_log_probs_of_other_tokens_are_an_error(logprobs: Any) -> None:
    with pytest.raises(EngineError, match="log-probs"):
        chosen_logprobs(logprobs, [5, 6])


def test_no_tokens_have_no_log_probs() -> None:
    assert chosen_logprobs(None, []).shape == (0,)


def test_the_versions_of_a_whole_answer_are_those_that_the_engine_reports() -> None:
    output = Answer(asked(version=4)).output(reply(1, 2, 3, reason="length", spans=[("4", 0, 1), ("5", 1, 3)]))
    assert output.spans == (VersionSpan(version=4, start=0, stop=1), VersionSpan(version=5, start=1, stop=3))


def test_streamed_pieces_are_in_response_coordinates() -> None:
    answer = Answer(asked(version=4))
    pieces = [answer.output(reply(1, 2)), answer.output(reply(3, reason="stop", spans=[("4", 0, 3)]))]
    assert [span for piece in pieces for span in piece.spans] == [
        VersionSpan(version=4, start=0, stop=2),
        VersionSpan(version=4, start=2, stop=3),
    ]
    assert [piece.finish_reason for piece in pieces] == [None, "stop"]


def test_streamed_tokens_of_another_version_are_an_error_at_the_end() -> None:
    answer = Answer(asked(version=4))
    answer.output(reply(1, 2))
    with pytest.raises(EngineError, match="pinned to version 4"):
        answer.output(reply(3, reason="stop", spans=[("4", 0, 1), ("5", 1, 3)]))


@pytest.mark.parametrize("spans", [None, [], [("4", 0, 2)], [("4", 1, 3)], [("4", 0, 1), ("4", 2, 3)]])
def test_tokens_without_a_reported_version_are_an_error(spans: Any) -> None:
    with pytest.raises(EngineError, match="weight versions"):
        Answer(asked()).output(reply(1, 2, 3, reason="stop", spans=spans))


def test_a_release_that_reports_no_versions_with_tokens_is_asked_before_and_after() -> None:
    answer = Answer(asked(version=4))
    answer.output(reply(1, 2))
    output = answer.output(reply(3, reason="stop"), served=(4, 4))
    assert output.spans == (VersionSpan(version=4, start=2, stop=3),)
    whole = Answer(asked(version=4)).output(reply(1, 2, reason="stop"), served=(4, 4))
    assert whole.spans == (VersionSpan(version=4, start=0, stop=2),)


@pytest.mark.parametrize("served", [(4, 5), (3, 4), (5, 5)])
def test_weights_that_changed_meanwhile_are_an_error(served: tuple[int, int]) -> None:
    with pytest.raises(EngineError, match="pinned to version 4"):
        Answer(asked(version=4)).output(reply(1, 2, reason="stop"), served=served)


def test_an_answer_without_tokens_has_no_span() -> None:
    output = Answer(asked()).output(reply(reason="abort", spans=[]))
    assert (output.spans, output.finish_reason) == ((), "aborted")


def test_weights_that_somebody_else_labelled_are_an_error() -> None:
    assert version_of("-1") == -1
    with pytest.raises(EngineError, match="'default'"):
        version_of("default")
