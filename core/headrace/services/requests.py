"""The requests that an instance's engine is working on, from submission to the answer that somebody waits for.

Invariant: a request is in the engine under the version it is pinned to, or on its way to or from another instance, and
never both; the version of every span handed on is the one the engine reported.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from headrace.contract import (
    Array,
    Completion,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceEngine,
    KVMigration,
    RequestState,
    VersionSpan,
)
from headrace.errors import ContractError, EngineError
from headrace.services.request_messages import Generated

_SEED_STEP = 0x9E3779B97F4A7C15


@dataclass(slots=True)
class Pending:
    """A request, its pieces so far and who waits for them."""

    request: GenerationRequest
    done: asyncio.Future[Generated]
    trajectory: int = -1
    attempt: int = 0
    movable: bool = False
    count: int = 0
    """Tokens so far."""
    before: int = 0
    """Tokens that the engine knows as a part of the prompt: its own count begins after them."""
    token_ids: list[Array] = field(default_factory=list)
    logprobs: list[Array] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    taken: asyncio.Future[RequestState | None] | None = None
    """Set while the request is aborted in order to go on elsewhere."""

    def add(self, output: GenerationOutput) -> None:
        """The next piece. ContractError when it is not one: tokens whose place is in doubt are never trained on."""
        tokens, stop = len(output.token_ids), self.count + len(output.token_ids)
        begins, ends = ([edge + self.before for edge in edges] for edges in _edges(output.spans))
        if len(output.logprobs) != tokens or [*begins, stop] != [self.count, *ends]:
            raise ContractError(
                f"an output has {tokens} tokens, {len(output.logprobs)} log-probs and spans "
                f"{list(zip(begins, ends, strict=True))}, where tokens from {self.count} on were due",
                origin=f"request {output.request_id}",
                fix="an output holds what is new since the one before it; test_streamed_pieces_join_to_the_whole of "
                "headrace.testing.suites shows how",
            )
        spans = [replace(s, start=s.start + self.before, stop=s.stop + self.before) for s in output.spans]
        self._append(output.token_ids, output.logprobs, spans)

    def begin(self, state: RequestState, *, known: int) -> None:
        """The first ``known`` tokens of the answer are those of ``state``, whatever there was before."""
        self.count, self.before = 0, 0
        self.token_ids, self.logprobs, self.spans = [], [], []
        spans = [replace(s, stop=min(s.stop, known)) for s in state.spans if s.start < known]
        self._append(state.token_ids[:known], state.logprobs[:known], spans)

    def _append(self, token_ids: Array, logprobs: Array, spans: Sequence[VersionSpan]) -> None:
        self.count += len(token_ids)
        self.token_ids.append(token_ids)
        self.logprobs.append(logprobs)
        self.spans.extend(spans)

    def completion(self, reason: FinishReason) -> Completion:
        """All pieces as one answer."""
        return Completion(
            token_ids=np.concatenate(self.token_ids),
            logprobs=np.concatenate(self.logprobs),
            spans=_joined(self.spans),
            finish_reason=reason,
        )

    def state(self) -> RequestState:
        """What there is so far, without keys and values."""
        so_far = self.completion("aborted")
        return replace(
            RequestState.unbegun(self.request),
            token_ids=so_far.token_ids,
            logprobs=so_far.logprobs,
            spans=so_far.spans,
        )


class Requests:
    """``migrates``: the engine declares that it is :class:`KVMigration`."""

    def __init__(self, engine: InferenceEngine, *, migrates: bool) -> None:
        self._engine = engine
        self.migration = engine if migrates and isinstance(engine, KVMigration) else None
        self._pending: dict[str, Pending] = {}
        self._open: dict[str, int] = {}
        """Requests the engine has and has not ended, also those that nobody waits for any more, and those on their way
        → their version."""
        self._left = asyncio.Event()
        """Set whenever a request is not here any more."""

    def open(
        self, request: GenerationRequest, *, trajectory: int = -1, attempt: int = 0, movable: bool = False
    ) -> Pending:
        """Somebody will wait for this request."""
        done: asyncio.Future[Generated] = asyncio.get_running_loop().create_future()
        pending = Pending(request, done, trajectory=trajectory, attempt=attempt, movable=movable)
        self._pending[request.request_id] = pending
        return pending

    def get(self, request_id: str) -> Pending | None:
        """A request that somebody waits for, or may still ask for."""
        return self._pending.get(request_id)

    def movable(self, trajectory: int, version: int) -> Pending | None:
        """The request that a trajectory is waiting for, where it may move."""
        for pending in self.under_way():
            if (pending.trajectory, pending.request.version) == (trajectory, version):
                return pending
        return None

    def under_way(self) -> list[Pending]:
        """Those that somebody waits for and that may go on elsewhere, or under another version."""
        return [pending for pending in self._pending.values() if pending.movable and not pending.done.done()]

    async def close(self, pending: Pending) -> None:
        """Nobody waits for it any more; the engine need not go on with it."""
        request_id = pending.request.request_id
        if not pending.done.done() or pending.done.cancelled():  # whoever stops waiting for it cancels it
            pending.done.cancel()
            if pending.taken is not None and not pending.taken.done():
                pending.taken.set_result(None)
            await self._engine.abort([request_id])
        if self._pending.get(request_id) is pending:
            del self._pending[request_id]

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Have the engine work on requests."""
        opened = {request.request_id: request.version for request in requests}
        self._open |= opened
        try:
            await self._engine.submit(requests)
        except BaseException:  # cancelled too: the engine has none of them; raised again
            for request_id in opened:
                self._forget(request_id)
            raise

    async def collect(self) -> None:
        """Hand the engine's outputs on; ends with the engine. Nobody waits for what one that failed has not told."""
        try:
            async for outputs in self._engine.outputs():
                for output in outputs:
                    if output.finish_reason is not None:
                        self._forget(output.request_id)
                    await self._hear(output)
        except Exception as error:  # a plugin may raise anything; raised again
            for pending in self._pending.values():
                if pending.taken is not None and not pending.taken.done():
                    pending.taken.set_exception(error)
            raise

    async def require_version(self, version: int) -> None:
        """EngineError when the engine does not serve it."""
        live = (await self._engine.health()).versions
        if version not in live:
            raise EngineError(
                f"version {version} is not served here; live are {list(live)}",
                fix="move a request to an instance that serves its version",
            )

    async def until_free(self, version: int) -> None:
        """Until no request of a version is here."""
        while self.of_version(version):
            self._left.clear()
            await self._left.wait()

    def of_version(self, version: int) -> list[str]:
        """Ids of the requests of a version that are here."""
        return [request_id for request_id, pinned in self._open.items() if pinned == version]

    def _forget(self, request_id: str) -> None:
        self._open.pop(request_id, None)
        self._left.set()

    async def _hear(self, output: GenerationOutput) -> None:
        pending = self._pending.get(output.request_id)
        if pending is None or pending.done.done():
            return
        try:
            pending.add(output)
        except ContractError as error:
            pending.done.set_exception(error)
            await self._engine.abort([output.request_id])
            return
        reason = output.finish_reason
        if pending.taken is not None and reason is not None:
            pending.taken.set_result(pending.state() if reason == "aborted" else None)
            if reason == "aborted":
                self._open[output.request_id] = pending.request.version  # on its way
                return
        if reason is not None:
            pending.done.set_result(Generated(completion=pending.completion(reason)))

    # ------------------------------------------------------------ moving

    async def take(self, pending: Pending, *, with_kv: bool = True) -> RequestState | None:
        """Take a request out of the engine; it counts as open until it is :meth:`gone` or goes on here. None when it
        ended meanwhile, or nobody waits for it any more. ``with_kv``: with its keys and values, where the engine can
        give them."""
        if self.migration is not None and with_kv:
            state = await self.migration.export_request(pending.request.request_id)
        else:
            pending.taken = asyncio.get_running_loop().create_future()
            await self._engine.abort([pending.request.request_id])
            state = await pending.taken
            pending.taken = None
        if state is not None and pending.done.done():
            self._forget(pending.request.request_id)
            return None
        return state

    def gone(self, pending: Pending, address: str) -> None:
        """It goes on at another instance."""
        self._forget(pending.request.request_id)
        if not pending.done.done():
            pending.done.set_result(Generated(moved=address))

    async def go_on(self, pending: Pending, state: RequestState) -> int:
        """Have this engine go on with a request, if somebody still waits for it. Returns of how many tokens it computes
        keys and values once more."""
        request, count = state.request, len(state.token_ids)
        if pending.done.done():
            self._forget(request.request_id)
            return 0
        self._open[request.request_id] = request.version
        again = 0 if state.kv or not count else len(request.prompt) + count
        try:
            if self.migration is not None:
                pending.begin(state, known=state.reported)
                await self.migration.import_request(state)
            else:
                pending.begin(state, known=count)
                pending.before = count
                await self._engine.submit([_continuation(state)])
        except BaseException:  # cancelled too: the engine does not have it; raised again
            self._forget(request.request_id)
            raise
        return again


def _continuation(state: RequestState) -> GenerationRequest:
    """For an engine that counts draws from the start of each request: the answer so far is a part of the prompt, and
    draws of another seed follow, since the same ones would come twice."""
    request, count = state.request, len(state.token_ids)
    if not count:
        return request
    sampling = replace(
        request.sampling,
        max_new_tokens=request.sampling.max_new_tokens - count,
        seed=(request.sampling.seed + count * _SEED_STEP) % 2**63,
    )
    return replace(request, prompt=np.concatenate([request.prompt, state.token_ids]), sampling=sampling)


def _edges(spans: Sequence[VersionSpan]) -> tuple[list[int], list[int]]:
    return [span.start for span in spans], [span.stop for span in spans]


def _joined(spans: list[VersionSpan]) -> tuple[VersionSpan, ...]:
    """Adjacent spans of one version as one."""
    joined: list[VersionSpan] = []
    for span in spans:
        if span.start == span.stop:
            continue
        if joined and joined[-1].version == span.version and joined[-1].stop == span.start:
            joined[-1] = VersionSpan(version=span.version, start=joined[-1].start, stop=span.stop)
        else:
            joined.append(span)
    return tuple(joined)
