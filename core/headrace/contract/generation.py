"""What goes into and comes out of an inference engine: token ids, never text."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, Self

import numpy as np

from headrace.contract.columns import Array

FinishReason = Literal["stop", "length", "aborted"]
"""``stop``: a stop token was sampled; ``length``: the token budget or the context ended;
``aborted``: :meth:`InferenceEngine.abort`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VersionSpan:
    """Response tokens ``start <= t < stop`` were sampled by policy ``version``."""

    version: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How tokens are drawn. Truncated sampling (top-p, top-k) is absent on purpose: log-probs of a
    truncated distribution cannot be compared with a trainer's."""

    max_new_tokens: int
    temperature: float = 1.0
    """> 0. Log-probs are those of the tempered distribution."""
    greedy: bool = False
    """Take the most likely token (evaluation only)."""
    stop_token_ids: tuple[int, ...] = ()
    """A sampled stop token ends the response and is part of it."""
    seed: int = 0
    """0 ≤ seed < 2**63. The draw of token ``t`` depends on ``(seed, t)`` and the distribution alone, never on which
    other requests share the batch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationRequest:
    """One continuation to sample, pinned to one policy version."""

    request_id: str
    prompt: Array
    """int32 [P], P >= 1."""
    sampling: Sampling
    version: int
    """The policy version that must produce every token."""
    stream: bool = False
    """True: an output whenever tokens arrive; False: one output, at the end."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class GenerationOutput:
    """Tokens of one request since its previous output."""

    request_id: str
    token_ids: Array
    """int32 [T]; T may be 0 in the last output."""
    logprobs: Array
    """float32 [T], nats, at the sampling temperature."""
    spans: tuple[VersionSpan, ...]
    """Cover exactly these T tokens, in response coordinates; reported by the engine itself."""
    finish_reason: FinishReason | None = None
    """None while more outputs follow."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RequestState:
    """An unfinished request on its way from one engine to another, or to the same one later. The sampler needs no
    state of its own: what is drawn next follows from the request's seed and the number of tokens (:class:`Sampling`).
    """

    request: GenerationRequest
    token_ids: Array
    """int32 [T]: the answer so far. T may be 0."""
    logprobs: Array
    """float32 [T], nats, at the sampling temperature."""
    spans: tuple[VersionSpan, ...]
    """Cover exactly these T tokens."""
    reported: int
    """Tokens that an output has brought already; the next one begins there."""
    fingerprint: str
    """Which keys and values these are, or are to be taken for; empty without any (:meth:`KVMigration.fingerprint`)."""
    kv: tuple[Array, ...] = ()
    """Keys and values of the P prompt tokens and the first T - 1 of the answer, in the engine's own layout, one array
    per layer where it has layers. Empty: whoever goes on computes them again."""

    @classmethod
    def unbegun(cls, request: GenerationRequest) -> Self:
        """Before the first token."""
        nothing = empty_tokens()
        return cls(
            request=request,
            token_ids=nothing,
            logprobs=nothing.astype(np.float32),
            spans=(),
            reported=0,
            fingerprint="",
        )

    @property
    def nbytes(self) -> int:
        """Of keys and values."""
        return sum(array.nbytes for array in self.kv)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Completion:
    """A finished generation, as an environment sees it."""

    token_ids: Array
    logprobs: Array
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason


def empty_tokens() -> Array:
    """int32 [0]."""
    return np.empty(0, dtype=np.int32)


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """A cheap look at an engine."""

    versions: tuple[int, ...]
    """Policy versions it can serve now, ascending."""
    running: int
    """Requests being decoded."""
    waiting: int
    """Requests accepted and not yet decoded."""
    kv_used: float
    """Share of KV capacity in use, 0 to 1."""
    generated_tokens: int
    """Since start."""
    prefilled_tokens: int = 0
    """Since start: tokens of prompts, and of answers that came without keys and values (:class:`RequestState`)."""
    parked: int = 0
    """Since start: how often a request was set aside in host memory, with its keys and values, for want of room."""
    digests: dict[int, str] = field(default_factory=dict)
    """Digest of the weights received per live version (:class:`WeightManifest`); none for those it started with."""
