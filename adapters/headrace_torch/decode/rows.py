"""What is known about each running sequence, as columns.

Invariant: rows are dense, ``0 <= i < count``; removing rows moves the last ones into the holes, and every
column moves with them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from headrace.contract.columns import Array
from headrace.contract.generation import FinishReason, GenerationOutput, GenerationRequest, RequestState, VersionSpan
from headrace_torch.decode.sampling import streams

_NO_STOP = -1


class Rows:
    """Columns of up to ``capacity`` sequences. Entries beyond ``count`` are meaningless."""

    def __init__(self, capacity: int, *, version: int, max_length: int) -> None:
        self._version = version
        self._max_length = max_length
        self.requests: list[GenerationRequest] = []
        self.earlier: list[tuple[VersionSpan, ...]] = []
        """Of the tokens that a sequence came with."""
        self.position = np.zeros(capacity, np.int64)
        """Position of ``token``, which no key exists for yet."""
        self.token = np.zeros(capacity, np.int64)
        """The newest token: the next step's input."""
        self.generated = np.zeros(capacity, np.int64)
        self.limit = np.zeros(capacity, np.int64)
        """Tokens after which a sequence ends: its budget, or the end of the context."""
        self.came_with = np.zeros(capacity, np.int64)
        """Tokens of the answer that were there when a sequence joined."""
        self.temperature = np.ones(capacity, np.float32)
        self.greedy = np.zeros(capacity, np.bool_)
        self.stream_start = np.zeros(capacity, np.uint64)
        self.sent = np.zeros(capacity, np.int64)
        """Tokens that an output has reported already."""
        self.stops = np.full((capacity, 1), _NO_STOP, np.int64)
        self.tokens = np.zeros((capacity, 16), np.int32)
        self.logprobs = np.zeros((capacity, 16), np.float32)

    @property
    def count(self) -> int:
        """Running sequences."""
        return len(self.requests)

    def append(self, states: Sequence[RequestState]) -> None:
        """New rows at the end, in order."""
        first, last = self.count, self.count + len(states)
        self.requests.extend(s.request for s in states)
        self.earlier.extend(s.spans for s in states)
        prompts = np.array([len(s.request.prompt) for s in states], np.int64)
        answers = np.array([len(s.token_ids) for s in states], np.int64)
        samplings = [s.request.sampling for s in states]
        budgets = np.array([s.max_new_tokens for s in samplings], np.int64)
        self.position[first:last] = prompts + answers - 1
        self.generated[first:last] = self.came_with[first:last] = answers
        self.sent[first:last] = [s.reported for s in states]
        self.limit[first:last] = np.minimum(budgets, self._max_length - prompts)
        self.temperature[first:last] = [s.temperature for s in samplings]
        self.greedy[first:last] = [s.greedy for s in samplings]
        self.stream_start[first:last] = streams(np.array([s.seed for s in samplings], np.uint64))
        self._reserve(int(self.limit[first:last].max()), max(len(s.stop_token_ids) for s in samplings))
        self.stops[first:last] = _NO_STOP
        for row, sampling in enumerate(samplings, start=first):
            self.stops[row, : len(sampling.stop_token_ids)] = sampling.stop_token_ids
        for row in (first + np.flatnonzero(answers)).tolist():
            state, length = states[row - first], self.generated[row]
            self.tokens[row, :length], self.logprobs[row, :length] = state.token_ids, state.logprobs
            self.token[row] = state.token_ids[-1]

    def _reserve(self, length: int, stops: int) -> None:
        if length > self.tokens.shape[1]:
            more = max(length, 2 * self.tokens.shape[1]) - self.tokens.shape[1]
            self.tokens = np.pad(self.tokens, ((0, 0), (0, more)))
            self.logprobs = np.pad(self.logprobs, ((0, 0), (0, more)))
        if stops > self.stops.shape[1]:
            self.stops = np.pad(self.stops, ((0, 0), (0, stops - self.stops.shape[1])), constant_values=_NO_STOP)

    def record(self, tokens: Array, logprobs: Array) -> Array:
        """Append one sampled token to every row; int64 indices of the rows that end with it, ascending."""
        n = self.count
        rows, t = np.arange(n), self.generated[:n]
        self.tokens[rows, t] = tokens
        self.logprobs[rows, t] = logprobs
        self.token[:n] = tokens
        self.generated[:n] += 1
        self.position[:n] += 1
        ended = (self.stops[:n] == tokens[:, None]).any(1) | (self.generated[:n] >= self.limit[:n])
        return np.flatnonzero(ended)

    def finish_reason(self, row: int) -> FinishReason:
        """Why an ended row ended."""
        return "stop" if self.token[row] in self.stops[row] else "length"

    def output(self, row: int, finish_reason: FinishReason | None) -> GenerationOutput:
        """What ``row`` has since its last output."""
        start, stop = int(self.sent[row]), int(self.generated[row])
        self.sent[row] = stop
        return GenerationOutput(
            request_id=self.requests[row].request_id,
            token_ids=self.tokens[row, start:stop].copy(),
            logprobs=self.logprobs[row, start:stop].copy(),
            spans=spans_between(self._spans(row), start, stop),
            finish_reason=finish_reason,
        )

    def state(self, row: int, *, fingerprint: str, kv: tuple[Array, ...]) -> RequestState:
        """``row`` with everything that it needs to go on elsewhere."""
        length = int(self.generated[row])
        return RequestState(
            request=self.requests[row],
            token_ids=self.tokens[row, :length].copy(),
            logprobs=self.logprobs[row, :length].copy(),
            spans=self._spans(row),
            reported=int(self.sent[row]),
            fingerprint=fingerprint,
            kv=kv,
        )

    def _spans(self, row: int) -> tuple[VersionSpan, ...]:
        """Of all its tokens; neighbours of one version are one."""
        earlier, start, stop = self.earlier[row], int(self.came_with[row]), int(self.generated[row])
        if start == stop:
            return earlier
        if earlier and earlier[-1].version == self._version:
            earlier, start = earlier[:-1], earlier[-1].start
        return (*earlier, VersionSpan(version=self._version, start=start, stop=stop))

    def remove(self, rows: Sequence[int]) -> tuple[list[int], list[int]]:
        """Drop ``rows`` (ascending). Returns the moves that closed the holes: sources, targets."""
        gone = set(rows)
        left = self.count - len(rows)
        sources = [row for row in range(left, self.count) if row not in gone]
        targets = [row for row in rows if row < left]
        self.move(sources, targets)
        del self.requests[left:], self.earlier[left:]
        return sources, targets

    def move(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Overwrite rows ``targets`` with rows ``sources``, all at once."""
        if not sources:
            return
        moved = [(self.requests[row], self.earlier[row]) for row in sources]
        for target, (request, earlier) in zip(targets, moved, strict=True):
            self.requests[target], self.earlier[target] = request, earlier
        for column in self._columns():
            column[targets] = column[sources]

    def _columns(self) -> tuple[Array, ...]:
        return (
            self.position,
            self.token,
            self.generated,
            self.limit,
            self.came_with,
            self.temperature,
            self.greedy,
            self.stream_start,
            self.sent,
            self.stops,
            self.tokens,
            self.logprobs,
        )


def spans_between(spans: Sequence[VersionSpan], start: int, stop: int) -> tuple[VersionSpan, ...]:
    """The parts of ``spans`` that cover tokens ``start <= t < stop``."""
    cut = ((span.version, max(span.start, start), min(span.stop, stop)) for span in spans)
    return tuple(VersionSpan(version=v, start=first, stop=last) for v, first, last in cut if first < last)
