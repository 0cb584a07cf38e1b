"""Who decodes when: waiting requests, slots, live policy versions. Synchronous; one thread calls it.

Invariants: requests are admitted in the order they were submitted, whatever their version; all versions
together never run more than ``slots`` sequences.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import torch

from headrace.contract.columns import Array
from headrace.contract.generation import FinishReason, GenerationOutput, GenerationRequest, empty_tokens
from headrace_torch.decode.batch import VersionBatch
from headrace_torch.decode.scoring import token_logprobs
from headrace_torch.model import Decoder

_PROMPT_TOKENS_PER_STEP = 8192
"""Bounds the activations of a step; a single longer prompt is still taken whole."""


class Scheduler:
    """Continuous batching over several policy versions."""

    def __init__(self, *, slots: int, max_length: int) -> None:
        self._slots = slots
        self._max_length = max_length
        self._waiting: deque[GenerationRequest] = deque()
        self._batches: dict[int, VersionBatch] = {}
        self.generated_tokens = 0

    @property
    def running(self) -> int:
        """Sequences being decoded, all versions together."""
        return sum(batch.running for batch in self._batches.values())

    @property
    def idle(self) -> bool:
        """Nothing to decode."""
        return not self._waiting and not self.running

    def install(self, version: int, model: Decoder) -> None:
        """Make ``version`` servable."""
        self._batches[version] = VersionBatch(model, version=version, slots=self._slots, max_length=self._max_length)

    def retire(self, version: int) -> None:
        """Forget a version that no request uses."""
        del self._batches[version]

    def submit(self, requests: Sequence[GenerationRequest]) -> list[GenerationOutput]:
        """Queue requests for live versions; those whose prompts leave no room for a token are over at once."""
        self._waiting.extend(r for r in requests if len(r.prompt) < self._max_length)
        return [_empty(r, "length") for r in requests if len(r.prompt) >= self._max_length]

    @torch.inference_mode()
    def score(self, version: int, tokens: Array, temperature: float) -> Array:
        """float32 [T]: log-probs of given tokens under a live version."""
        return token_logprobs(self._batches[version].model, tokens, temperature=temperature)

    @torch.inference_mode()
    def abort(self, request_ids: frozenset[str]) -> list[GenerationOutput]:
        """End these requests, running or waiting; others are ignored."""
        outputs = [o for batch in self._batches.values() for o in batch.abort(request_ids.__contains__)]
        outputs += [_empty(r, "aborted") for r in self._waiting if r.request_id in request_ids]
        self._waiting = deque(r for r in self._waiting if r.request_id not in request_ids)
        return outputs

    @torch.inference_mode()
    def step(self) -> list[GenerationOutput]:
        """One token for every running sequence, after filling the free slots."""
        joining = self._admit()
        outputs: list[GenerationOutput] = []
        for version, batch in self._batches.items():
            new = joining.get(version, [])
            if new or batch.running:
                self.generated_tokens += batch.running + len(new)
                outputs += batch.step(new)
        return outputs

    def _admit(self) -> dict[int, list[GenerationRequest]]:
        free = self._slots - self.running
        budget = _PROMPT_TOKENS_PER_STEP
        joining: dict[int, list[GenerationRequest]] = {}
        while self._waiting and free and (budget >= len(self._waiting[0].prompt) or not joining):
            request = self._waiting.popleft()
            joining.setdefault(request.version, []).append(request)
            free -= 1
            budget -= len(request.prompt)
        return joining


def _empty(request: GenerationRequest, reason: FinishReason) -> GenerationOutput:
    logprobs: Array = empty_tokens().astype("float32")
    return GenerationOutput(
        request_id=request.request_id, token_ids=empty_tokens(), logprobs=logprobs, spans=(), finish_reason=reason
    )
