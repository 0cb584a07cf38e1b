"""The rollout node: one inference engine behind a socket.

Requests are :mod:`~headrace.services.requests`, their moves :mod:`~headrace.services.moves`, and what becomes of them
when a version comes in the middle :mod:`~headrace.services.interruptions`; here requests come in, and versions do.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager

import msgspec

from headrace.contract import (
    Array,
    EngineHealth,
    InferenceContext,
    InferenceEngine,
    Interruption,
    MultiVersion,
    Scoring,
    WeightManifest,
    WeightReceiver,
    WeightTransport,
    WeightUpdate,
)
from headrace.errors import EngineError
from headrace.registry import build
from headrace.services.cohorts import Cohorts
from headrace.services.interruptions import Interruptions
from headrace.services.low_bit import build_scheme
from headrace.services.messages import LoadCall, RolloutSetup, VersionCall, VersionLoaded
from headrace.services.moves import Moves
from headrace.services.node import HEARTBEAT_SECONDS, NodeService
from headrace.services.node_messages import NodeSpec
from headrace.services.request_messages import GenerateCall, Generated, SwitchCall, Switched, WithdrawCall
from headrace.services.requests import Requests
from headrace.wire import rpc

BASE_VERSION = -1
"""The weights an engine starts with. Never served: policy versions begin at 0 and arrive by the transport."""
FETCH_DEADLINE = 60.0
FETCHED_BYTES = 4 << 20
RETIRE_DEADLINE = 60.0
HEALTH_DEADLINE = 5.0
"""For an answer that a living engine gives within a second."""


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


def _wanted(receiver: WeightReceiver, manifest: WeightManifest, update: WeightUpdate) -> Iterator[tuple[str, Array]]:
    """What an engine has not yet of a version. Whole ones may come another way, from which nothing can be left out."""
    wanted = {info.name for info in manifest.tensors if update.wants(info.name)}
    if len(wanted) == len(manifest.tensors):
        return receiver.fetch(manifest, deadline=FETCH_DEADLINE)
    return receiver.fetch_some(manifest, wanted, deadline=FETCH_DEADLINE)


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
        self._loading = asyncio.Lock()
        able = engine.capabilities(engine.settings)
        self._replaces = able.live_versions == 1
        """Whether a version that is committed takes the place of the one before."""
        self._requests = Requests(engine, migrates=able.kv_migration)
        self._interruptions = Interruptions(self._requests)
        self._moves = Moves(self._requests, name=self.name, connect=self.network.client, supervise=self.supervise)
        self._cohorts = Cohorts(submit=self._requests.submit, supervise=self.supervise, name=self.name)

    @property
    def served(self) -> tuple[object, ...]:
        return (self, self._moves)

    async def start(self) -> None:
        setup = self._setup
        await self._engine.start(
            InferenceContext(
                name=self.name,
                model_path=setup.model_path,
                version=BASE_VERSION,
                threads=setup.threads,
                quantization=build_scheme(setup.quantization),
            )
        )
        self._receiver = self._transport.receiver(self.transport_context(), setup.publisher)
        self.supervise(self._requests.collect(), "engine outputs")
        self.supervise(self._look(), "engine health")

    async def close(self) -> None:
        await self._moves.close()
        await self._engine.close()
        if self._receiver is not None:
            await asyncio.to_thread(self._receiver.close)

    async def _look(self) -> None:
        """Apart from the heartbeats that tell it: an engine that is slow to answer must not delay these."""
        told = 0
        while True:
            health = await self._engine.health()
            self.kv_used = health.kv_used
            self.parked += health.parked - told
            told = health.parked
            await asyncio.sleep(HEARTBEAT_SECONDS)

    @asynccontextmanager
    async def _answering(self) -> AsyncIterator[None]:
        """Around what an engine is needed for. What one raises that has failed is no answer: the node ends with it, and
        whoever asked learns that the instance is lost. What one raises that goes on serving is an answer."""
        try:
            yield
        except Exception as error:  # a plugin may raise anything
            if await self._engine_lives():
                raise
            if not self.failed.done():
                self.failed.set_exception(error)
            await asyncio.Event().wait()  # the server cancels this call when the node ends

    async def _engine_lives(self) -> bool:
        try:
            async with asyncio.timeout(HEALTH_DEADLINE):
                await self._engine.health()
        except Exception:  # whatever a dead engine says, or that it says nothing in time
            return False
        return True

    # ------------------------------------------------------------ generation

    @rpc
    async def generate(self, call: GenerateCall) -> Generated:
        """The whole completion of one request, or where it goes on."""
        if call.movable and (address := self._moves.sent_on(call.trajectory, call.attempt)):
            return Generated(moved=address)
        async with self._answering():
            return await (self._in_cohort(call) if call.cohort else self._alone(call))

    async def _alone(self, call: GenerateCall) -> Generated:
        pending = self._moves.arrived(call.request.request_id) or await self._interruptions.submit(call)
        try:
            return await pending.done
        finally:
            await self._requests.close(pending)

    async def _in_cohort(self, call: GenerateCall) -> Generated:
        pending = self._requests.open(call.request, trajectory=call.trajectory)
        try:
            with self._cohorts.get(call.cohort, call.cohort_size).entered(call.trajectory, call.request) as late:
                if late:
                    await self._requests.submit([call.request])
                return await pending.done
        finally:
            await self._requests.close(pending)

    @rpc
    async def withdraw(self, call: WithdrawCall) -> None:
        """A trajectory of a cohort will not come."""
        self._cohorts.get(call.cohort, call.cohort_size).withdraw(call.trajectory)

    # ------------------------------------------------------------ versions

    @rpc
    async def load_version(self, call: LoadCall) -> VersionLoaded:
        """Fetch, verify and commit a version; what is being decoded is not disturbed."""
        async with self._answering():
            return await self._load(call)

    async def _load(self, call: LoadCall) -> VersionLoaded:
        assert self._receiver is not None
        started = time.monotonic()
        async with self._loading:
            receiver = self._receiver
            manifest = await asyncio.to_thread(receiver.manifest, call.version, deadline=FETCH_DEADLINE)
            update = await self._engine.begin_update(manifest)
            tensors, nbytes = _wanted(receiver, manifest, update), 0
            try:
                while arrived := await asyncio.to_thread(_some, tensors):
                    for name, tensor in arrived:
                        await update.apply(name, tensor)
                        nbytes += tensor.nbytes
                transferred = time.monotonic()
                await self._commit(update, call.interruption if self._replaces else None)
            except BaseException:  # cancelled too: nothing half-loaded stays staged; raised again
                await update.abort()
                raise
            if isinstance(self._engine, MultiVersion):
                await self._engine.retire(BASE_VERSION)
        return VersionLoaded(
            version=call.version,
            digest=manifest.digest,
            transfer_seconds=transferred - started,
            nbytes=nbytes,
            logprobs=await self._scored(call),
        )

    async def _commit(self, update: WeightUpdate, interruption: Interruption | None) -> None:
        """``interruption``: set where the version takes the place of one that requests may be in the middle of."""
        if interruption is None:
            await update.commit()
        else:
            await self._interruptions.change(interruption, update.commit)

    @rpc
    async def switch_version(self, call: SwitchCall) -> Switched:
        """What may be interrupted goes on under a version that was loaded, and that the controller has verified."""
        async with self._answering():
            return await self._interruptions.switch(call.version, call.interruption)

    async def _scored(self, call: LoadCall) -> Array | None:
        probe = call.probe
        if probe is None or not isinstance(self._engine, Scoring):
            return None
        return await self._engine.score(probe.tokens, version=call.version, temperature=probe.temperature)

    @rpc
    async def retire_version(self, call: VersionCall) -> None:
        """Forget a version. The controller asks when nobody is pinned to it any more; requests that were given up a
        moment ago may still be on their way out."""
        try:
            async with asyncio.timeout(RETIRE_DEADLINE):
                await self._requests.until_free(call.version)
        except TimeoutError:
            raise EngineError(
                f"version {call.version} is still in use after {RETIRE_DEADLINE:g} s, by requests "
                f"{', '.join(self._requests.of_version(call.version))}",
                origin=f"node {self.name}",
                fix="an engine ends a request when it is aborted; see whether it still decodes",
            ) from None
        if isinstance(self._engine, MultiVersion):
            async with self._answering():
                await self._engine.retire(call.version)

    @rpc
    async def health(self, request: None) -> EngineHealth:
        """The engine's own health."""
        return await self._engine.health()
