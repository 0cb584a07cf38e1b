"""The rollout node: one inference engine behind a socket.

Invariant: a request reaches the engine only with the version it is pinned to, and the version of every span
handed on is the one the engine reported.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np

from headrace.contract import (
    Array,
    Completion,
    EngineHealth,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceContext,
    InferenceEngine,
    MultiVersion,
    Scoring,
    VersionSpan,
    WeightReceiver,
    WeightTransport,
)
from headrace.errors import ContractError
from headrace.registry import build
from headrace.services.cohorts import Cohorts
from headrace.services.messages import (
    GenerateCall,
    LoadCall,
    NodeSpec,
    RolloutSetup,
    VersionCall,
    VersionLoaded,
    WithdrawCall,
)
from headrace.services.node import NodeService
from headrace.wire import rpc

BASE_VERSION = -1
"""The weights an engine starts with. Never served: policy versions begin at 0 and arrive by the transport."""
FETCH_DEADLINE = 60.0
FETCHED_BYTES = 4 << 20


@dataclass(slots=True)
class _Pending:
    """One request the engine is working on: its pieces so far and who waits for them."""

    done: asyncio.Future[Completion]
    count: int = 0
    """Tokens so far."""
    token_ids: list[Array] = field(default_factory=list)
    logprobs: list[Array] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)

    def add(self, output: GenerationOutput) -> None:
        """The next piece. ContractError when it is not one: tokens whose place is in doubt are never trained on."""
        tokens, stop = len(output.token_ids), self.count + len(output.token_ids)
        begins, ends = [s.start for s in output.spans], [s.stop for s in output.spans]
        if len(output.logprobs) != tokens or [*begins, stop] != [self.count, *ends]:
            raise ContractError(
                f"an output has {tokens} tokens, {len(output.logprobs)} log-probs and spans "
                f"{list(zip(begins, ends, strict=True))}, where tokens from {self.count} on were due",
                origin=f"request {output.request_id}",
                fix="an output holds what is new since the one before it; test_streamed_pieces_join_to_the_whole of "
                "headrace.testing.suites shows how",
            )
        self.count = stop
        self.token_ids.append(output.token_ids)
        self.logprobs.append(output.logprobs)
        self.spans.extend(output.spans)

    def completion(self, reason: FinishReason) -> Completion:
        return Completion(
            token_ids=np.concatenate(self.token_ids),
            logprobs=np.concatenate(self.logprobs),
            spans=_joined(self.spans),
            finish_reason=reason,
        )


def _some(tensors: Iterator[tuple[str, Array]]) -> list[tuple[str, Array]]:
    """The next tensors, of at most :data:`FETCHED_BYTES` together unless one alone has more; none at the end. Taken one
    by one, small ones would cost more in changes of threads than in copies."""
    taken: list[tuple[str, Array]] = []
    nbytes = 0
    for name, tensor in tensors:
        taken.append((name, tensor))
        nbytes += tensor.nbytes
        if nbytes >= FETCHED_BYTES:
            break
    return taken


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


class RolloutService(NodeService):
    """Serves ``generate``, version loading and health of one instance."""

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        self._setup = msgspec.msgpack.decode(spec.setup, type=RolloutSetup)
        engine = build(self._setup.engine)
        transport = build(self._setup.transport)
        assert isinstance(engine, InferenceEngine)
        assert isinstance(transport, WeightTransport)
        self._engine = engine
        self._transport = transport
        self._receiver: WeightReceiver | None = None
        self._pending: dict[str, _Pending] = {}
        self._outputs: asyncio.Task[None] | None = None
        self._loading = asyncio.Lock()
        self._open: dict[str, int] = {}
        """Requests the engine has and has not ended, also those that nobody waits for any more → their version."""
        self._cohorts = Cohorts(submit=self._submit, supervise=self.supervise, name=self.name)
        self._left = asyncio.Event()
        """Set whenever the engine has ended a request."""

    async def start(self) -> None:
        setup = self._setup
        await self._engine.start(
            InferenceContext(name=self.name, model_path=setup.model_path, version=BASE_VERSION, threads=setup.threads)
        )
        self._receiver = self._transport.receiver(self.transport_context(), setup.publisher)
        self._outputs = self.supervise(self._collect(), "engine outputs")

    async def close(self) -> None:
        await self._engine.close()
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)

    # ------------------------------------------------------------ generation

    @rpc
    async def generate(self, call: GenerateCall) -> Completion:
        """The whole completion of one request."""
        pending = _Pending(asyncio.get_running_loop().create_future())
        self._pending[call.request.request_id] = pending
        try:
            if not call.cohort:
                await self._submit([call.request])
                return await pending.done
            with self._cohorts.get(call.cohort, call.cohort_size).entered(call.trajectory, call.request) as late:
                if late:
                    await self._submit([call.request])
                return await pending.done
        finally:
            if not pending.done.done() or pending.done.cancelled():  # whoever stops waiting for it cancels it
                await self._engine.abort([call.request.request_id])
            del self._pending[call.request.request_id]

    async def _submit(self, requests: Sequence[GenerationRequest]) -> None:
        opened = {request.request_id: request.version for request in requests}
        self._open |= opened
        try:
            await self._engine.submit(requests)
        except BaseException:  # cancelled too: the engine has none of them; raised again
            for request_id in opened:
                self._open.pop(request_id, None)
            raise

    @rpc
    async def withdraw(self, call: WithdrawCall) -> None:
        """A trajectory of a cohort will not come."""
        self._cohorts.get(call.cohort, call.cohort_size).withdraw(call.trajectory)

    async def _collect(self) -> None:
        async for outputs in self._engine.outputs():
            for output in outputs:
                if output.finish_reason is not None:
                    self._open.pop(output.request_id, None)
                    self._left.set()
                pending = self._pending.get(output.request_id)
                if pending is None or pending.done.done():
                    continue
                try:
                    pending.add(output)
                except ContractError as error:
                    pending.done.set_exception(error)
                    await self._engine.abort([output.request_id])
                    continue
                if output.finish_reason is not None:
                    pending.done.set_result(pending.completion(output.finish_reason))

    # ------------------------------------------------------------ versions

    @rpc
    async def load_version(self, call: LoadCall) -> VersionLoaded:
        """Fetch, verify and commit a version; what is being decoded is not disturbed."""
        assert self._receiver is not None
        started = time.monotonic()
        async with self._loading:
            receiver = self._receiver
            manifest = await asyncio.to_thread(receiver.manifest, call.version, deadline=FETCH_DEADLINE)
            update = await self._engine.begin_update(manifest)
            tensors = receiver.fetch(manifest, deadline=FETCH_DEADLINE)
            try:
                while arrived := await asyncio.to_thread(_some, tensors):
                    for name, tensor in arrived:
                        await update.apply(name, tensor)
                await update.commit()
            except BaseException:  # cancelled too: nothing half-loaded stays staged; raised again
                await update.abort()
                raise
            if isinstance(self._engine, MultiVersion):
                await self._engine.retire(BASE_VERSION)
        return VersionLoaded(
            version=call.version,
            digest=manifest.digest,
            seconds=time.monotonic() - started,
            logprobs=await self._scored(call),
        )

    async def _scored(self, call: LoadCall) -> Array | None:
        probe = call.probe
        if probe is None or not isinstance(self._engine, Scoring):
            return None
        return await self._engine.score(probe.tokens, version=call.version, temperature=probe.temperature)

    @rpc
    async def retire_version(self, call: VersionCall) -> None:
        """Forget a version. The controller asks when nobody is pinned to it any more; requests that were given up a
        moment ago may still be on their way out."""
        while call.version in self._open.values():
            self._left.clear()
            await self._left.wait()
        if isinstance(self._engine, MultiVersion):
            await self._engine.retire(call.version)

    @rpc
    async def health(self, request: None) -> EngineHealth:
        """The engine's own health."""
        return await self._engine.health()
