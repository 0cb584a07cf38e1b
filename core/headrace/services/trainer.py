"""The trainer node: one training engine, its algorithm, and the weights it publishes.

It reads a batch, or what has come of it, from the storage units; :mod:`headrace.services.training_phase` trains it.
Invariant: engine calls happen on one thread, one at a time.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec

from headrace.contract import (
    Algorithm,
    Batch,
    ScratchModels,
    TrainingContext,
    TrainingEngine,
    WeightPublisher,
    WeightSource,
    WeightTransport,
)
from headrace.dataplane import AsyncPlane
from headrace.errors import RunError
from headrace.registry import build, load
from headrace.services.low_bit import LowBitSource, build_scheme
from headrace.services.messages import (
    PeerCall,
    PhaseSetup,
    PublishCall,
    Published,
    RestoreCall,
    SaveCall,
    ScratchModel,
    TrainCall,
    TrainerSetup,
    TrainReply,
    VersionCall,
)
from headrace.services.node import NodeService
from headrace.services.node_messages import NodeSpec
from headrace.services.training_phase import TrainingPhase
from headrace.wire import rpc

T = TypeVar("T")


class TrainerService(NodeService):
    """Serves phases, training batches, weight publication and saves."""

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        self._setup = msgspec.msgpack.decode(spec.setup, type=TrainerSetup)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._plane = AsyncPlane(self._setup.ledger, name=spec.id, connect=self.network.client)
        self._scheme = build_scheme(self._setup.quantization)
        self._publisher: WeightPublisher | None = None
        self._engine: TrainingEngine | None = None
        self._phase: TrainingPhase | None = None

    async def start(self) -> None:
        transport = build(self._setup.transport)
        assert isinstance(transport, WeightTransport)
        self._publisher = await asyncio.to_thread(transport.publisher, self.transport_context())

    async def close(self) -> None:
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        if self._engine is not None:
            await self._on_engine_thread(self._engine.close)
        self._thread.shutdown()
        await self._plane.close()

    async def _on_engine_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)

    def _running(self) -> TrainingPhase:
        if self._phase is None:
            raise RunError("the trainer has no phase yet", origin=f"node {self.name}")
        return self._phase

    # ------------------------------------------------------------ phases

    @rpc
    async def publisher_address(self, request: None) -> str:
        """Where receivers of weights connect."""
        assert self._publisher is not None
        return self._publisher.address()

    @rpc
    async def create_model(self, call: ScratchModel) -> None:
        """Write a randomly initialised model directory."""
        cls = load("training_engine", call.engine.use, directory=call.engine.directory)
        assert issubclass(cls, ScratchModels)
        with self._writing(call.path, fix="free disk space, or put the runs elsewhere with [job] runs"):
            await self._on_engine_thread(lambda: cls.create_model(call.path, settings=call.settings, seed=call.seed))

    @rpc
    async def begin_phase(self, setup: PhaseSetup) -> None:
        """Replace the engine by one with this phase's settings, on ``setup.model_path``."""
        algorithm = build(setup.algorithm)
        engine = build(setup.engine)
        assert isinstance(algorithm, Algorithm)
        assert isinstance(engine, TrainingEngine)
        values = algorithm.needs(algorithm.settings).values
        await self._on_engine_thread(lambda: self._start_engine(engine, setup, values=values))
        phase = TrainingPhase(engine, algorithm, setup, dumps=Path(self._setup.dumps))
        await self._on_engine_thread(phase.freeze_reference)
        self._phase = phase

    def _start_engine(self, engine: TrainingEngine, setup: PhaseSetup, *, values: bool) -> None:
        if self._engine is not None:
            self._engine.close()
        self._engine = engine
        engine.start(
            TrainingContext(
                name=self.name,
                model_path=setup.model_path,
                seed=self._setup.seed,
                threads=self._setup.threads,
                total_steps=setup.total_steps,
                values=values,
                quantization=self._scheme if self._setup.align else None,
            )
        )

    # ------------------------------------------------------------ batches

    @rpc
    async def train(self, call: TrainCall) -> TrainReply:
        """Train one batch, or a part of it."""
        phase = self._running()
        batch = None
        if len(call.rows):  # which are in training until the last part is answered
            batch = await self._plane.get(call.partition, call.rows, call.units, call.columns, held=True)
        return await self._on_engine_thread(lambda: phase.train(batch, call.version, last=call.last))

    @rpc
    async def logprobs(self, batch: Batch) -> Batch:
        """The current policy's log-probs of ``batch`` (columns ``tokens``, ``loss_mask``) at the phase's sampling
        temperature: the start-up self-check compares them with an engine's."""
        phase = self._running()
        outputs = await self._on_engine_thread(lambda: phase.engine.forward(batch, temperature=phase.setup.temperature))
        return Batch(rows=batch.rows, columns={"logprobs": outputs["logprobs"]})

    @rpc
    async def unit_lost(self, peer: PeerCall) -> None:
        """The storage unit at this address is gone."""
        await self._plane.lost(peer.address)

    # ------------------------------------------------------------ weights

    @rpc
    async def publish(self, call: PublishCall) -> Published:
        """Publish the current weights as a version."""
        phase, publisher = self._running(), self._publisher
        assert publisher is not None

        def work() -> Published:
            manifest = publisher.publish(call.version, self._weights(phase.engine))
            return Published(manifest=manifest, logprobs=phase.score(call.probe) if call.probe else None)

        return await self._on_engine_thread(work)

    def _weights(self, engine: TrainingEngine) -> WeightSource:
        """What engines get: an aligned trainer gives its low-bit weights itself."""
        source = engine.weight_source()
        return source if self._scheme is None or self._setup.align else LowBitSource(source, self._scheme)

    @rpc
    async def retire_version(self, call: VersionCall) -> None:
        """Stop serving a version."""
        assert self._publisher is not None
        await asyncio.to_thread(self._publisher.retire, call.version)

    @rpc
    async def restore(self, call: RestoreCall) -> None:
        """Go on from a resume save."""
        phase = self._running()
        await self._on_engine_thread(lambda: phase.engine.load(call.path))

    @rpc
    async def save(self, call: SaveCall) -> None:
        """Write a resume or export directory."""
        phase = self._running()
        fix = "free disk space, keep fewer with [checkpoint] keep, or put the runs elsewhere with [job] runs"
        with self._writing(call.path, fix=fix):
            await self._on_engine_thread(lambda: phase.engine.save(call.path, kind=call.kind))

    @contextmanager
    def _writing(self, path: str, *, fix: str) -> Iterator[None]:
        """What the disk refuses becomes a RunError."""
        try:
            yield
        except OSError as error:
            reason = error.strerror or error
            raise RunError(f"{path} cannot be written: {reason}", origin=f"node {self.name}", fix=fix) from error
