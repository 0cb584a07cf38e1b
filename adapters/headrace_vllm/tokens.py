"""What goes into vLLM and what comes out of it, in its words and in ours. Knows shapes and names, and no vLLM.

Invariant: the version of a token is the label that vLLM itself reports for it; a log-prob is of the distribution that
the token was drawn from, temperature included (``logprobs_mode="processed_logprobs"``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from headrace.contract.columns import Array
from headrace.contract.generation import FinishReason, GenerationOutput, GenerationRequest, VersionSpan
from headrace.errors import EngineError
from headrace_vllm.names import TEMPERATURE

NATIVE_TEMPERATURES = (0.05, 2.0)
"""vLLM refuses temperatures above 2 and takes those near 0 for another one."""

_REASONS: Mapping[str, FinishReason] = {"stop": "stop", "length": "length", "abort": "aborted"}


def sampling_arguments(request: GenerationRequest, *, context: int) -> dict[str, Any]:
    """Of ``SamplingParams``, less ``output_kind``. ``context``: tokens of the longest sequence; the prompt leaves room.

    Nothing is truncated, and nothing but the request's own tokens stops it.
    """
    sampling = request.sampling
    return {
        **tempering_arguments(sampling.temperature, greedy=sampling.greedy),
        "max_tokens": min(sampling.max_new_tokens, context - len(request.prompt)),
        "stop_token_ids": list(sampling.stop_token_ids),
        "seed": sampling.seed,
        "ignore_eos": True,
        "logprobs": 0,
        "flat_logprobs": True,
        "detokenize": False,
    }


def tempering_arguments(temperature: float, *, greedy: bool) -> dict[str, Any]:
    """Those that make log-probs be of the distribution at ``temperature``. For greedy requests vLLM reports log-probs
    at temperature 1; their logits are divided before."""
    low, high = NATIVE_TEMPERATURES
    if not greedy and low <= temperature <= high:
        return {"temperature": temperature}
    extra = {} if temperature == 1 else {"extra_args": {TEMPERATURE: temperature}}
    return {"temperature": 0.0 if greedy else 1.0, **extra}


def salt(version: int) -> str:
    """Keeps the keys and values of a version from being used under another one."""
    return f"version {version}"


def finish_reason(reported: str | None) -> FinishReason | None:
    """EngineError for what no request of ours can end by."""
    if reported is None:
        return None
    if reported not in _REASONS:
        raise EngineError(
            f"vLLM ended a request by {reported!r}; expected is one of {', '.join(_REASONS)}",
            fix="see the instance's log for what happened to the request",
        )
    return _REASONS[reported]


def chosen_logprobs(logprobs: Any, token_ids: Sequence[int]) -> Array:
    """float32 [T]: of the tokens that were drawn. ``logprobs``: a ``FlatLogprobs``, or a dict for each position.
    EngineError when they are not those of these tokens."""
    if not token_ids:
        return np.empty(0, dtype=np.float32)
    if hasattr(logprobs, "start_indices"):
        places = logprobs.start_indices
        found = [logprobs.token_ids[place] for place in places]
        values = [logprobs.logprobs[place] for place in places]
    else:
        found = [token for token, position in zip(token_ids, logprobs or (), strict=False) if token in position]
        values = [position[token].logprob for token, position in zip(found, logprobs or (), strict=False)]
    if found != list(token_ids):
        raise EngineError(
            f"vLLM reported log-probs of {len(found)} tokens {found[:5]} … for the tokens {list(token_ids[:5])} …",
            fix="this release of vLLM reports log-probs in another form; use one that the adapter was tested with",
        )
    return np.array(values, dtype=np.float32)


def version_of(label: str) -> int:
    """The policy version that vLLM's weights are labelled with. EngineError when somebody else labelled them."""
    try:
        return int(label)
    except ValueError:
        raise EngineError(
            f"vLLM labels its weights {label!r}, which is no policy version",
            fix="let nothing but this adapter update the weights of an instance",
        ) from None


def reported_spans(weight_versions: Sequence[Any] | None, count: int) -> tuple[VersionSpan, ...]:
    """The spans of all ``count`` tokens of a response, as vLLM reports them with the last one. EngineError when they
    do not cover the tokens."""
    spans = tuple(
        VersionSpan(version=version_of(span.version), start=span.start, stop=span.end)
        for span in weight_versions or ()
        if span.end > span.start
    )
    begins, ends = [span.start for span in spans], [span.stop for span in spans]
    if [*begins, count] != [0, *ends]:
        raise EngineError(
            f"vLLM reported the weight versions {list(weight_versions or ())} for {count} tokens",
            fix="use a release of vLLM that reports the weight version of every token",
        )
    return spans


class Answer:
    """A request on its way through vLLM, from its first output to its last."""

    def __init__(self, request: GenerationRequest) -> None:
        self.request = request
        self._count = 0

    def output(self, reply: Any, *, served: tuple[int, int] | None = None) -> GenerationOutput:
        """``reply``: a ``RequestOutput`` with the tokens since the one before it. ``served``: what vLLM said it served
        before the request and said after its last token, from a release that does not report it with the tokens.

        vLLM reports versions with the last tokens only. Tokens that are streamed before are told as those of the
        request's version, to which its engine is held while the request is open; if vLLM then says otherwise, it is an
        EngineError.
        """
        (completion,) = reply.outputs
        token_ids = list(completion.token_ids)
        start, self._count = self._count, self._count + len(token_ids)
        reason = finish_reason(completion.finish_reason)
        spans = self._pinned(start)
        if reason is not None:
            reported = self._reported(completion, served)
            if start and reported != self._pinned(0):
                raise self._moved(list(reported))
            spans = spans if start else reported
        return GenerationOutput(
            request_id=self.request.request_id,
            token_ids=np.array(token_ids, dtype=np.int32),
            logprobs=chosen_logprobs(completion.logprobs, token_ids),
            spans=spans,
            finish_reason=reason,
        )

    def _reported(self, completion: Any, served: tuple[int, int] | None) -> tuple[VersionSpan, ...]:
        if served is None:
            return reported_spans(completion.weight_versions, self._count)
        if set(served) != {self.request.version}:
            raise self._moved(served)
        return self._pinned(0)

    def _pinned(self, start: int) -> tuple[VersionSpan, ...]:
        if start == self._count:
            return ()
        return (VersionSpan(version=self.request.version, start=start, stop=self._count),)

    def _moved(self, said: object) -> EngineError:
        return EngineError(
            f"request {self.request.request_id!r} is pinned to version {self.request.version}; vLLM reports {said} for "
            "its tokens",
            fix="let nothing but this adapter update the weights of an instance",
        )
