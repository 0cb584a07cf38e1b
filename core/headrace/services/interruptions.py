"""Answers that go on under another version in the middle, at one rollout instance.

Invariant: once the instance has switched, nothing that may be interrupted is submitted under an older version, nor left
in the engine under one; what was sampled before keeps its version. Who changes versions does so alone: another waits.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from time import monotonic

from headrace.contract import GenerationRequest, Interruption, RequestState
from headrace.services.request_messages import GenerateCall, Switched
from headrace.services.requests import Pending, Requests


@dataclass(frozen=True, slots=True)
class _Held:
    """Requests that are out of the engine."""

    requests: list[tuple[Pending, RequestState]]
    began: float
    """Monotonic seconds: when the first was to come out, and when all were."""
    ended: float


class Interruptions:
    """Of the requests that may move: those of trajectories that are rolled out, outside lockstep."""

    def __init__(self, requests: Requests) -> None:
        self._requests = requests
        self._version = -1
        """What they are generated under at least."""
        self._changing = asyncio.Lock()
        """Held by whoever has requests taken out or given back: of two, one waits until the other is done."""
        self._out = asyncio.Lock()
        """Held while requests are out of the engine: none comes in between."""
        self._taken: asyncio.Future[_Held] | None = None
        """None when the engine has them all."""

    async def submit(self, call: GenerateCall) -> Pending:
        """Have the engine work on a request, under the version of now where that is newer."""
        async with self._out:
            request = self._under(call.request) if call.movable else call.request
            pending = self._requests.open(
                request, trajectory=call.trajectory, attempt=call.attempt, movable=call.movable
            )
            try:
                await self._requests.submit([request])
            except BaseException:  # cancelled too: nobody will wait for it; raised again
                await self._requests.close(pending)
                raise
            return pending

    async def change(self, interruption: Interruption, commit: Callable[[], Awaitable[None]]) -> None:
        """Take all of them out of the engine, where ``commit`` replaces the version that they are under, until
        :meth:`switch`; what is out already stays so. Where it fails, or is given up, they go on as they were."""
        async with self._changing:
            await self._hold(interruption)
            try:
                await commit()
            except BaseException:  # cancelled too; raised again
                await self._go_on()
                raise

    async def switch(self, version: int, interruption: Interruption) -> Switched:
        """Have all of them go on under a version that the engine serves."""
        async with self._changing:
            await self._hold(interruption)
            self._version = version
            return await self._go_on()

    async def _hold(self, interruption: Interruption) -> None:
        if self._taken is None:
            await self._out.acquire()
            self._taken = asyncio.ensure_future(self._take_all(with_kv=interruption.keep_kv))
        try:
            await asyncio.shield(self._taken)
        except BaseException:  # cancelled, when some are out and others on their way; raised again
            await self._go_on()
            raise

    async def _take_all(self, *, with_kv: bool) -> _Held:
        began, under_way = monotonic(), self._requests.under_way()
        states = await asyncio.gather(*(self._take(pending, with_kv=with_kv) for pending in under_way))
        taken = [(p, state) for p, state in zip(under_way, states, strict=True) if state is not None]
        return _Held(taken, began, monotonic())

    async def _take(self, pending: Pending, *, with_kv: bool) -> RequestState | None:
        try:
            return await self._requests.take(pending, with_kv=with_kv)
        except Exception as error:  # a plugin may raise anything: it is told to who waits
            _fail(pending, error)
            return None

    async def _go_on(self) -> Switched:
        """Give the engine back what is out, even if whoever asks for it goes away meanwhile."""
        taken, self._taken = self._taken, None
        assert taken is not None, "only what is out goes on"
        return await asyncio.shield(asyncio.ensure_future(self._give_back(taken)))

    async def _give_back(self, taken: asyncio.Future[_Held]) -> Switched:
        try:
            held = await taken
            began = monotonic()
            again = [await self._resume(pending, state) for pending, state in held.requests]
            ended = monotonic()
        finally:
            self._out.release()
        tokens = [(pending, len(state.token_ids)) for pending, state in held.requests]
        return Switched(
            interrupted=[(pending.trajectory, pending.attempt, count) for pending, count in tokens if count],
            prefilled_tokens=sum(again),
            pause_seconds=held.ended - held.began,
            resume_seconds=ended - began,
            stopped_seconds=ended - held.began,
        )

    async def _resume(self, pending: Pending, state: RequestState) -> int:
        pending.request = self._under(state.request)
        migration = self._requests.migration
        if state.kv and migration is not None:
            state = replace(state, fingerprint=migration.fingerprint(pending.request.version))
        try:
            return await self._requests.go_on(pending, replace(state, request=pending.request))
        except Exception as error:  # a plugin may raise anything: it is told to who waits
            _fail(pending, error)
            return 0

    def _under(self, request: GenerationRequest) -> GenerationRequest:
        return request if request.version >= self._version else replace(request, version=self._version)


def _fail(pending: Pending, error: Exception) -> None:
    """Its trajectory is tried again."""
    if not pending.done.done():
        pending.done.set_exception(error)
