"""Who decodes when: waiting requests, slots, live policy versions. Synchronous; one thread calls it.

Invariants: requests are admitted in the order they were submitted, whatever their version, but those that had begun
elsewhere go first; all versions together never run more than ``slots`` sequences.

Where memory for keys and values is bounded, sequences that grow beyond it are *parked*: the youngest of the newest
version leaves, with its keys and values in host memory, and is the first to join when there is room (the hierarchical
memory of DORA, arXiv 2604.26256). Nothing is computed again for that, and what is oldest finishes first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from headrace.contract.columns import Array
from headrace.contract.generation import FinishReason, GenerationOutput, RequestState
from headrace_torch.decode.adapters import AdaptedModel
from headrace_torch.decode.arena import KeyValueArena, Shape
from headrace_torch.decode.batch import VersionBatch
from headrace_torch.decode.rows import spans_between
from headrace_torch.decode.scoring import token_logprobs
from headrace_torch.model import Decoder

_PROMPT_TOKENS_PER_STEP = 8192
"""Bounds the activations of a step; a single longer prompt is still taken whole."""


class Scheduler:
    """Continuous batching over several policy versions. ``kv_tokens``: that there is memory for, ``max_length`` at
    least; None: for all slots at full length, under each version."""

    def __init__(self, *, slots: int, max_length: int, kv_tokens: int | None = None) -> None:
        self._slots = slots
        self._max_length = max_length
        self._kv_tokens = kv_tokens
        self._waiting: deque[RequestState] = deque()
        self._batches: dict[int, VersionBatch] = {}
        self.generated_tokens = 0
        self.parked = 0
        """How often a sequence was, since the start."""
        self._retired_prefilled = 0

    @property
    def running(self) -> int:
        """Sequences being decoded, all versions together."""
        return sum(batch.running for batch in self._batches.values())

    @property
    def kv_used(self) -> float:
        """Share of what there is memory for; where that is unbounded, of what all slots hold at full length: slots that
        are all busy are not short of memory."""
        if self._kv_tokens is not None:
            return min(1.0, self._tokens(self._shapes()) / self._kv_tokens)  # of what the next step would take
        cached = sum(batch.cached_tokens for batch in self._batches.values())
        return cached / (self._slots * self._max_length)

    @property
    def prefilled_tokens(self) -> int:
        """Since the start: see :class:`~headrace.contract.generation.EngineHealth`."""
        return self._retired_prefilled + sum(batch.prefilled_tokens for batch in self._batches.values())

    @property
    def idle(self) -> bool:
        """Nothing to decode."""
        return not self._waiting and not self.running

    def install(self, version: int, model: Decoder | AdaptedModel) -> None:
        """Make ``version`` servable."""
        self._batches[version] = VersionBatch(model, version=version, slots=self._slots, max_length=self._max_length)

    def retire(self, version: int) -> None:
        """Forget a version that no request uses."""
        self._retired_prefilled += self._batches.pop(version).prefilled_tokens

    def submit(self, states: Sequence[RequestState]) -> list[GenerationOutput]:
        """Queue requests for live versions; those that have no room for another token are over at once."""
        for state in states:
            if self._has_room(state):
                (self._waiting.appendleft if len(state.token_ids) else self._waiting.append)(state)
        return [_last(state, "length") for state in states if not self._has_room(state)]

    def _has_room(self, state: RequestState) -> bool:
        known = len(state.token_ids)
        return known < min(state.request.sampling.max_new_tokens, self._max_length - len(state.request.prompt))

    @torch.inference_mode()
    def take(self, request_id: str, *, fingerprint: str) -> RequestState | None:
        """Let an unfinished request go, to go on elsewhere; None when it is not here."""
        for batch in self._batches.values():
            if (state := batch.take(request_id, fingerprint=fingerprint)) is not None:
                return state
        for state in self._waiting:
            if state.request.request_id == request_id:
                self._waiting.remove(state)
                return replace(state, fingerprint=fingerprint) if state.kv else state
        return None

    def put_back(self, state: RequestState | None) -> None:
        """What :meth:`take` gave is not wanted elsewhere after all."""
        if state is not None:
            self._waiting.appendleft(state)

    @torch.inference_mode()
    def score(self, version: int, tokens: Array, temperature: float) -> Array:
        """float32 [T]: log-probs of given tokens under a live version."""
        return token_logprobs(self._batches[version].model, tokens, temperature=temperature)

    @torch.inference_mode()
    def abort(self, request_ids: frozenset[str]) -> list[GenerationOutput]:
        """End these requests, running or waiting; others are ignored."""
        outputs = [o for batch in self._batches.values() for o in batch.abort(request_ids.__contains__)]
        outputs += [_last(s, "aborted") for s in self._waiting if s.request.request_id in request_ids]
        self._waiting = deque(s for s in self._waiting if s.request.request_id not in request_ids)
        return outputs

    @torch.inference_mode()
    def step(self) -> list[GenerationOutput]:
        """One token for every running sequence, after filling the free slots."""
        self._park()
        joining = self._admit()
        outputs: list[GenerationOutput] = []
        for version, batch in self._batches.items():
            new = joining.get(version, [])
            if new or batch.running:
                self.generated_tokens += batch.running + len(new)
                outputs += batch.step(new)
        return outputs

    def _admit(self) -> dict[int, list[RequestState]]:
        free = self._slots - self.running
        budget = _PROMPT_TOKENS_PER_STEP
        joining: dict[int, list[RequestState]] = {}
        shapes = self._shapes()
        while self._waiting and free and (budget >= _to_prefill(self._waiting[0]) or not joining):
            version, known = self._waiting[0].request.version, _known(self._waiting[0])
            wanted = shapes | {version: shapes[version].joined(known)}
            if not self._is_room_for(wanted):
                break
            state, shapes = self._waiting.popleft(), wanted
            joining.setdefault(version, []).append(state)
            free -= 1
            budget -= _to_prefill(state)
        self._share_memory(shapes)
        return joining

    # ------------------------------------------------------------ memory

    def _shapes(self) -> dict[int, Shape]:
        """Version → what its running sequences need room for in the next step."""
        return {version: batch.shape for version, batch in self._batches.items()}

    def _tokens(self, shapes: Mapping[int, Shape]) -> int:
        return sum(self._batches[version].arena.least(shape).tokens for version, shape in shapes.items())

    def _is_room_for(self, shapes: Mapping[int, Shape]) -> bool:
        return self._kv_tokens is None or self._tokens(shapes) <= self._kv_tokens

    def _park(self) -> None:
        while not self._is_room_for(self._shapes()):
            newest = max(version for version, batch in self._batches.items() if batch.running)
            self._waiting.appendleft(self._batches[newest].park())
            self.parked += 1

    def _share_memory(self, shapes: Mapping[int, Shape]) -> None:
        """Each version gets as much more than it needs as there is."""
        if self._kv_tokens is None:
            return
        needs = [(self._batches[version].arena, need) for version, need in shapes.items()]
        for ample in (KeyValueArena.grown, KeyValueArena.covering, KeyValueArena.least):
            given = [(arena, ample(arena, need)) for arena, need in needs]
            if sum(shape.tokens for _, shape in given) <= self._kv_tokens:
                break
        for arena, shape in sorted(given, key=lambda each: each[1].tokens - each[0].shape.tokens):
            arena.become(shape)


def _to_prefill(state: RequestState) -> int:
    """Tokens."""
    return 0 if state.kv else _known(state)


def _known(state: RequestState) -> int:
    """Tokens of prompt and answer."""
    return len(state.request.prompt) + len(state.token_ids)


def _last(state: RequestState, reason: FinishReason) -> GenerationOutput:
    """What no output has brought yet of a request that ends before it is decoded."""
    return GenerationOutput(
        request_id=state.request.request_id,
        token_ids=state.token_ids[state.reported :],
        logprobs=state.logprobs[state.reported :],
        spans=spans_between(state.spans, state.reported, len(state.token_ids)),
        finish_reason=reason,
    )
