"""The running sequences of one policy version, advanced one token at a time.

A step takes the newest token of every running sequence and the whole prompts of those that join, in one
flat batch. Invariant: no Python work per sequence and token, except for sequences that stream or end.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from headrace.contract.columns import Array
from headrace.contract.generation import GenerationOutput, RequestState
from headrace.errors import EngineError
from headrace_torch.decode.adapters import AdaptedModel, flattened
from headrace_torch.decode.arena import KeyValueArena, Shape
from headrace_torch.decode.attention import Prompts, Running, StepAttention, length_bias
from headrace_torch.decode.order import segments, sorting_moves
from headrace_torch.decode.rows import Rows
from headrace_torch.decode.sampling import sample, uniforms
from headrace_torch.model import Decoder

_SEGMENT_OVERHEAD = {"cpu": 400_000, "cuda": 30_000_000}
"""Bytes of keys and values that are read in the time that one more segment costs: three calls, or launches."""


class VersionBatch:
    """Continuous batch of at most ``slots`` sequences under one policy version."""

    def __init__(self, model: Decoder | AdaptedModel, *, version: int, slots: int, max_length: int) -> None:
        self.model = flattened(model, max_length=max_length)
        weight, c = self.model.embedding, self.model.config
        self._version = version
        self._device = str(weight.device)
        self._dtype = weight.dtype
        self._kv_heads = c.num_key_value_heads
        self._rows = Rows(slots, version=version, max_length=max_length)
        self.arena = KeyValueArena(c, rows=slots, length=max_length, dtype=weight.dtype, device=self._device)
        self.prefilled_tokens = 0
        self._streaming = 0
        self._changed = False
        """Rows joined or left since they were last sorted."""
        token_bytes = 2 * c.num_key_value_heads * c.head_dim * weight.element_size()
        self._segment_overhead = _SEGMENT_OVERHEAD[weight.device.type] // token_bytes

    @property
    def running(self) -> int:
        """Sequences being decoded."""
        return self._rows.count

    @property
    def shape(self) -> Shape:
        """What its sequences need room for in the next step."""
        rows = self._rows
        return Shape(rows.count, int(rows.position[: rows.count].max(initial=-1)) + 1)

    @property
    def cached_tokens(self) -> int:
        """Those whose keys and values are kept."""
        return int(self._rows.position[: self._rows.count].sum())

    def step(self, joining: Sequence[RequestState]) -> list[GenerationOutput]:
        """Admit ``joining`` and sample one token for every sequence. Outputs of those that stream or end."""
        self._append([state for state in joining if state.kv])
        rows, running = self._rows, self._rows.count
        if self._changed:
            self._sort()
        tokens, positions = rows.token[:running].copy(), rows.position[:running].copy()
        prefilled = [_known_tokens(state) for state in joining if not state.kv]
        self._append([state for state in joining if not state.kv])
        self.prefilled_tokens += sum(map(len, prefilled))
        sampled, logprobs = self._sample(self._hidden(tokens, positions, prefilled))
        if not np.isfinite(logprobs).all():
            bad = rows.requests[int(np.flatnonzero(~np.isfinite(logprobs))[0])].request_id
            raise EngineError(
                f"the weights of version {self._version} give a distribution that is not finite (request {bad!r})",
                fix="look for a diverged training step before this version, and resume before it",
            )
        ended = [int(row) for row in rows.record(sampled, logprobs)]
        outputs = [rows.output(row, rows.finish_reason(row)) for row in ended]
        if self._streaming:
            gone = set(ended)
            streams = (i for i, request in enumerate(rows.requests) if request.stream and i not in gone)
            outputs += [rows.output(row, None) for row in streams]
        if ended:
            self._remove(ended)
        return outputs

    def abort(self, matches: Callable[[str], bool]) -> list[GenerationOutput]:
        """End the sequences whose request id matches, with what they have."""
        gone = [row for row, request in enumerate(self._rows.requests) if matches(request.request_id)]
        outputs = [self._rows.output(row, "aborted") for row in gone]
        if gone:
            self._remove(gone)
        return outputs

    def take(self, request_id: str, *, fingerprint: str) -> RequestState | None:
        """Let a sequence go, to go on elsewhere; None when it is not here."""
        for row, request in enumerate(self._rows.requests):
            if request.request_id == request_id:
                kv = self.arena.read(row, length=int(self._rows.position[row]))
                state = self._rows.state(row, fingerprint=fingerprint, kv=kv)
                self._remove([row])
                return state
        return None

    def park(self) -> RequestState:
        """Let the youngest sequence go, to go on here later."""
        youngest = int(self._rows.generated[: self._rows.count].argmin())
        state = self.take(self._rows.requests[youngest].request_id, fingerprint="")
        assert state is not None, "it runs here"
        return state

    def _append(self, states: Sequence[RequestState]) -> None:
        """New rows, with the keys and values that they bring."""
        if not states:
            return
        first = self._rows.count
        self._rows.append(states)
        self._streaming += sum(state.request.stream for state in states)
        self._changed = True
        if states[0].kv:
            self.arena.reserve(rows=self._rows.count, length=int(self._rows.position[first : self._rows.count].max()))
            for row, state in enumerate(states, start=first):
                self.arena.write(row, state.kv)

    def _remove(self, gone: list[int]) -> None:
        self._streaming -= sum(self._rows.requests[row].stream for row in gone)
        self._move(*self._rows.remove(gone))
        self._changed = True

    def _sort(self) -> None:
        self._changed = False
        if self._rows.count:
            keys = self._rows.position[: self._rows.count] + 1
            sources, targets = sorting_moves(keys, overhead=self._segment_overhead)
            self._rows.move(sources, targets)
            self._move(sources, targets)

    def _move(self, sources: list[int], targets: list[int]) -> None:
        if sources:
            self.arena.move(sources, targets, length=int(self._rows.position[targets].max()))

    def _hidden(self, tokens: Array, positions: Array, joining: Sequence[Array]) -> Tensor:
        """[n, d]: the last hidden state of every row. ``tokens``, ``positions``: of the rows whose keys and values are
        there; ``joining``: all tokens of each of the others."""
        running = len(tokens)
        owners = np.arange(running)
        lengths = np.array([len(known) for known in joining], np.int64)
        if joining:
            tokens = np.concatenate([tokens, *joining])
            positions = np.concatenate([positions, _ramps(lengths)])
            owners = np.concatenate([owners, np.repeat(np.arange(running, self._rows.count), lengths)])
        self.arena.reserve(rows=self._rows.count, length=int(positions.max()) + 1)
        attention = self._attention(running, positions, owners, lengths)
        hidden = self.model.hidden(self._tensor(tokens), self._tensor(positions), attention)
        if not joining:
            return hidden
        last = np.concatenate([np.arange(running), running + np.cumsum(lengths) - 1])
        return hidden.index_select(0, self._tensor(last))

    def _attention(self, running: int, positions: Array, owners: Array, lengths: Array) -> StepAttention:
        heads = owners[:, None] * self._kv_heads + np.arange(self._kv_heads)
        write_index = (heads * self.arena.length + positions[:, None]).reshape(-1)
        return StepAttention(
            arena=self.arena,
            write_index=self._tensor(write_index),
            running=self._segments(positions[:running] + 1) if running else (),
            prompts=self._prompts(running, lengths) if len(lengths) else None,
        )

    def _segments(self, keys: Array) -> list[Running]:
        counts = self._tensor(keys)
        return [
            Running(
                first=part.first,
                count=part.count,
                longest=part.longest,
                bias=length_bias(
                    counts.narrow(0, part.first, part.count),
                    longest=part.longest,
                    kv_heads=self._kv_heads,
                    dtype=self._dtype,
                ),
            )
            for part in segments(keys, overhead=self._segment_overhead)
        ]

    def _prompts(self, first: int, lengths: Array) -> Prompts:
        longest = int(lengths.max())
        index = None
        if (lengths != longest).any():
            index = self._tensor(np.repeat(np.arange(len(lengths)) * longest, lengths) + _ramps(lengths))
        return Prompts(first=first, count=len(lengths), longest=longest, padded_index=index)

    def _sample(self, hidden: Tensor) -> tuple[Array, Array]:
        rows, n = self._rows, self._rows.count
        temperature, greedy = rows.temperature[:n], rows.greedy[:n]
        tokens, logprobs = sample(
            self.model.logits(hidden),
            u=self._tensor(uniforms(rows.stream_start[:n], rows.generated[:n])),
            temperature=self._tensor(temperature[:, None]) if (temperature != 1).any() else None,
            greedy=self._tensor(greedy) if greedy.any() else None,
        )
        return tokens.cpu().numpy(), logprobs.cpu().numpy()

    def _tensor(self, array: Array) -> Tensor:
        return torch.from_numpy(array).to(self._device)


def _known_tokens(state: RequestState) -> Array:
    """int32: prompt, and the answer so far."""
    return np.concatenate([state.request.prompt, state.token_ids]) if len(state.token_ids) else state.request.prompt


def _ramps(lengths: Array) -> Array:
    """int64 [sum]: 0, 1, … length - 1 for each length."""
    starts = np.cumsum(lengths) - lengths
    ramps: Array = np.arange(int(lengths.sum())) - np.repeat(starts, lengths)
    return ramps
