"""What goes into SGLang and what comes out of it, in its words and in ours. Knows shapes and names, and no SGLang.

Invariant: the version of a token is the label that SGLang itself reports for it; a log-prob is of the distribution that
the token was drawn from, temperature included.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.contract.generation import FinishReason, GenerationOutput, GenerationRequest, VersionSpan
from headrace.errors import EngineError

LOWEST_TEMPERATURE = 1e-6
"""SGLang takes lower ones for greedy requests at temperature 1."""
GREEDY = 1
"""``top_k`` of a request that takes the most likely token, whose log-probs are at its temperature all the same."""

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


def generate_body(request: GenerationRequest, *, name: str, context: int) -> dict[str, Any]:
    """Of ``POST /generate``. ``name``: for SGLang; ``context``: tokens of the longest sequence, of which
    the prompt leaves room.

    Nothing is truncated, and nothing but the request's own tokens stops it.
    """
    sampling = request.sampling
    length = min(sampling.max_new_tokens, context - len(request.prompt))
    parameters = {**sampling_parameters(sampling.temperature), "max_new_tokens": length, "sampling_seed": sampling.seed}
    if sampling.stop_token_ids:
        parameters["stop_token_ids"] = list(sampling.stop_token_ids)
    if sampling.greedy:
        parameters["top_k"] = GREEDY
    return {
        "rid": name,
        "input_ids": request.prompt.tolist(),
        "sampling_params": parameters,
        "return_logprob": True,
        "stream": request.stream,
        "extra_key": cache_key(request.version),
    }


def logprob_body(before: Sequence[int], token: int, *, version: int, temperature: float, name: str) -> dict[str, Any]:
    """Of ``POST /generate``, for the log-prob of ``token`` after ``before``: SGLang's log-probs of prompts are
    untempered, those of tokens beside the one that it draws are not."""
    return {
        "rid": name,
        "input_ids": list(before),
        "sampling_params": {**sampling_parameters(temperature), "max_new_tokens": 1},
        "return_logprob": True,
        "token_ids_logprob": [token],
        "extra_key": cache_key(version),
    }


def sampling_parameters(temperature: float) -> dict[str, Any]:
    """ValueError for a temperature that SGLang takes for another one."""
    if temperature < LOWEST_TEMPERATURE:
        raise ValueError(f"SGLang samples at temperatures from {LOWEST_TEMPERATURE:g} on, got {temperature:g}")
    return {"temperature": temperature}


def cache_key(version: int) -> str:
    """Keeps the keys and values of a version from being used under another one."""
    return f"version {version}"


def version_of(label: str) -> int:
    """The policy version that SGLang's weights are labelled with. EngineError when somebody else labelled them."""
    try:
        return int(label)
    except ValueError:
        raise EngineError(
            f"SGLang labels its weights {label!r}, which is no policy version",
            fix="let nothing but this adapter update the weights of an instance",
        ) from None


def finish_reason(reported: Mapping[str, Any] | None) -> FinishReason | None:
    """EngineError for what no request of ours can end by."""
    if reported is None:
        return None
    kind = reported["type"]
    if kind not in _REASONS or reported.get("status_code"):
        raise EngineError(
            f"SGLang ended a request by {dict(reported)}; expected is one of {', '.join(_REASONS)}",
            fix="see the instance's log for what happened to the request",
        )
    return _REASONS[kind]


def reported_spans(weight_versions: Sequence[Mapping[str, Any]] | None, count: int) -> tuple[VersionSpan, ...]:
    """The spans of all ``count`` tokens of a response, as SGLang reports them with the last one. EngineError when they
    do not cover the tokens."""
    spans = tuple(
        VersionSpan(version=version_of(span["version"]), start=span["start"], stop=span["end"])
        for span in weight_versions or ()
        if span["end"] > span["start"]
    )
    begins, ends = [span.start for span in spans], [span.stop for span in spans]
    if [*begins, count] != [0, *ends]:
        raise EngineError(
            f"SGLang reported the weight versions {list(weight_versions or ())} for {count} tokens",
            fix="use a release of SGLang that reports the weight version of every token",
        )
    return spans


class Answer:
    """A request on its way through SGLang, from its first reply to its last."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._count = 0

    def output(self, reply: Mapping[str, Any]) -> GenerationOutput:
        """``reply``: of ``POST /generate``, with the tokens since the one before it.

        SGLang reports versions with the last tokens only. Tokens that are streamed before are told as those of the
        request's version, to which its engine is held while the request is open; if SGLang then says otherwise, it is
        an EngineError.
        """
        told = reply["meta_info"]
        start = self._count
        drawn = fresh_tokens(told, start)
        self._count = start + len(drawn)
        reason = finish_reason(told["finish_reason"])
        spans = self._pinned(start)
        if reason is not None:
            reported = reported_spans(told.get("weight_versions"), self._count)
            if start and reported != self._pinned(0):
                raise self._moved(reported)
            spans = spans if start else reported
        return GenerationOutput(
            request_id=self.request.request_id,
            token_ids=np.array([token for _, token, *_ in drawn], dtype=np.int32),
            logprobs=np.array([logprob for logprob, *_ in drawn], dtype=np.float32),
            spans=spans,
            finish_reason=reason,
        )

    def _pinned(self, start: int) -> tuple[VersionSpan, ...]:
        if start == self._count:
            return ()
        return (VersionSpan(version=self.request.version, start=start, stop=self._count),)

    def _moved(self, said: object) -> EngineError:
        return EngineError(
            f"request {self.request.request_id!r} is pinned to version {self.request.version}; SGLang reports {said} "
            "for its tokens",
            fix="let nothing but this adapter update the weights of an instance",
        )


def fresh_tokens(told: Mapping[str, Any], start: int) -> list[list[Any]]:
    """Log-prob and token id of each token after the first ``start``. ``told``: a reply's ``meta_info``.

    A reply has the tokens since the one before it; one that tells of an abort in the queue has all of them, after
    those. EngineError when some are missing.
    """
    count, drawn = told["completion_tokens"], told.get("output_token_logprobs") or []
    fresh: list[list[Any]] = drawn[len(drawn) - count :][start:] if len(drawn) >= count else drawn
    if len(fresh) != count - start:
        raise EngineError(
            f"SGLang reported {len(fresh)} log-probs for {count - start} tokens",
            fix="this release of SGLang reports log-probs in another form; use one that the adapter was tested with",
        )
    return fresh
