"""The trainer node: one training engine, its algorithm, and the weights it publishes.

A training batch in order: read its rows from the storage unit → the algorithm's advantages and loss weights →
proximal and reference log-probs where the loss reads them → mini-batches (one optimiser step each) of
micro-batches (sums that are scaled once). Invariant: engine calls happen on one thread, one at a time.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import msgspec
import numpy as np

from headrace import clock
from headrace.contract import (
    Algorithm,
    Array,
    Batch,
    Column,
    LossSpec,
    Metric,
    Ragged,
    ScratchModels,
    Snapshots,
    StepResult,
    TrainingContext,
    TrainingEngine,
    WeightPublisher,
    WeightTransport,
    merge_metrics,
)
from headrace.contract.columns import (
    DENOMINATOR,
    GROUP,
    LOSS_MASK,
    PROXIMAL_LOGPROBS,
    REFERENCE_LOGPROBS,
    REWARD,
    TOKENS,
    VERSION,
)
from headrace.dataplane import AsyncPlane
from headrace.errors import RunError
from headrace.flow.batching import micro_batches, mini_batches
from headrace.registry import build, load
from headrace.services.dumps import dump
from headrace.services.messages import (
    NodeSpec,
    PeerCall,
    PhaseSetup,
    Probe,
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
from headrace.wire import rpc

T = TypeVar("T")

REFERENCE = "reference"


class TrainerService(NodeService):
    """Serves phases, training batches, weight publication and saves."""

    def __init__(self, spec: NodeSpec) -> None:
        super().__init__(spec)
        self._setup = msgspec.msgpack.decode(spec.setup, type=TrainerSetup)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="engine")
        self._plane = AsyncPlane(self._setup.ledger, name=spec.id, connect=self.network.client)
        self._publisher: WeightPublisher | None = None
        self._engine: TrainingEngine | None = None
        self._phase: _Phase | None = None

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

    def _running(self) -> _Phase:
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
        await self._on_engine_thread(lambda: cls.create_model(call.path, settings=call.settings, seed=call.seed))

    @rpc
    async def begin_phase(self, setup: PhaseSetup) -> None:
        """Replace the engine by one with this phase's settings, on ``setup.model_path``."""
        algorithm = build(setup.algorithm)
        engine = build(setup.engine)
        assert isinstance(algorithm, Algorithm)
        assert isinstance(engine, TrainingEngine)
        await self._on_engine_thread(lambda: self._start_engine(engine, setup))
        phase = _Phase(engine, algorithm, setup, dumps=Path(self._setup.dumps))
        await self._on_engine_thread(phase.freeze_reference)
        self._phase = phase

    def _start_engine(self, engine: TrainingEngine, setup: PhaseSetup) -> None:
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
            )
        )

    # ------------------------------------------------------------ batches

    @rpc
    async def train(self, call: TrainCall) -> TrainReply:
        """Train one batch."""
        phase = self._running()
        batch = await self._plane.get(call.partition, call.rows, call.units, call.columns)
        return await self._on_engine_thread(lambda: phase.train(batch, call.version))

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
            manifest = publisher.publish(call.version, phase.engine.weight_source())
            return Published(manifest=manifest, logprobs=phase.score(call.probe) if call.probe else None)

        return await self._on_engine_thread(work)

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
        try:
            await self._on_engine_thread(lambda: phase.engine.save(call.path, kind=call.kind))
        except OSError as error:
            raise RunError(
                f"{call.path} cannot be written: {error.strerror or error}",
                origin=f"node {self.name}",
                fix="free disk space, keep fewer with [checkpoint] keep, or put the runs elsewhere with [job] runs",
            ) from error


class _Phase:
    """An engine with the algorithm that feeds it. Methods run on the engine thread."""

    def __init__(self, engine: TrainingEngine, algorithm: Algorithm, setup: PhaseSetup, *, dumps: Path) -> None:
        self.engine = engine
        self._dumps = dumps
        self.setup = setup
        self._algorithm = algorithm
        self._needs = algorithm.needs(algorithm.settings)
        self._loss: LossSpec = algorithm.loss(temperature=setup.temperature)

    def freeze_reference(self) -> None:
        if self._needs.reference_logprobs:
            assert isinstance(self.engine, Snapshots)
            self.engine.snapshot(REFERENCE)

    def score(self, probe: Probe) -> Array:
        """float32 [T]: log-probs of the probe's tokens, 0 for the first."""
        known = np.arange(len(probe.tokens)) > 0
        columns: dict[str, Column] = {
            TOKENS: Ragged.from_arrays([probe.tokens]),
            LOSS_MASK: Ragged.from_arrays([known]),
        }
        batch = Batch(rows=np.zeros(1, dtype=np.int64), columns=columns)
        return self.engine.forward(batch, temperature=probe.temperature)["logprobs"][0]

    def train(self, batch: Batch, version: int) -> TrainReply:
        started = clock.now()
        staleness, rewards = version - batch.dense(VERSION), batch.dense(REWARD).tolist()
        prepared = self._algorithm.prepare(batch)
        batch = batch.with_columns(prepared.columns)
        trained = np.asarray(prepared.trained, dtype=bool)
        batch = self._with_policy_logprobs(batch, trained)
        results: list[StepResult] = []
        dumped: list[str] = []
        for number, (part, mask) in enumerate(self._mini_batches(batch, trained)):
            results.append(self._step(part, mask))
            if not math.isfinite(results[-1].loss) or not math.isfinite(results[-1].gradient_norm):
                dumped.append(dump(part, self._dumps, f"version-{version:08d}-step-{number}"))
        return TrainReply(
            applied=sum(r.applied for r in results),
            skipped=sum(not r.applied for r in results),
            dumped=[path for path in dumped if path],
            metrics=merge_metrics(
                [prepared.metrics, _staleness_metrics(staleness), *(_step_metrics(r) for r in results)]
            ),
            tokens=sum(int(mask.sum()) for mask, used in zip(batch.ragged(LOSS_MASK), trained, strict=True) if used),
            rewards=rewards,
            started=started,
            finished=clock.now(),
        )

    def _with_policy_logprobs(self, batch: Batch, trained: np.ndarray) -> Batch:
        """Proximal and reference log-probs, from before the batch's first step. Rows that are not trained get
        zeros: no loss ever reads them."""
        wanted = []
        if self._needs.proximal_logprobs:
            wanted.append((PROXIMAL_LOGPROBS, "current"))
        if self._needs.reference_logprobs:
            wanted.append((REFERENCE_LOGPROBS, REFERENCE))
        for column, weights in wanted:
            tokens = batch.ragged(TOKENS)
            values = np.zeros(len(tokens.values), dtype=np.float32)
            for rows in micro_batches(
                tokens.lengths, token_budget=self.setup.micro_batch_tokens, rows=np.flatnonzero(trained)
            ):
                part = batch.take(rows)
                found = self.engine.forward(part, weights=weights, temperature=self.setup.temperature)
                for row, logprobs in zip(rows, found["logprobs"], strict=True):
                    values[tokens.offsets[row] : tokens.offsets[row + 1]] = logprobs
            batch = batch.with_columns({column: tokens.like(values)})
        return batch

    def _mini_batches(self, batch: Batch, trained: np.ndarray) -> Iterator[tuple[Batch, np.ndarray]]:
        for rows in mini_batches(batch.dense(GROUP), count=self.setup.mini_batches):
            yield batch.take(rows), trained[rows]

    def _step(self, batch: Batch, trained: np.ndarray) -> StepResult:
        step = self.engine.begin_step(self._loss)
        lengths = batch.ragged(TOKENS).lengths
        budget = self.setup.micro_batch_tokens
        try:
            for rows in micro_batches(lengths, token_budget=budget, rows=np.flatnonzero(trained)):
                step.accumulate(batch.take(rows))
            return step.finish(denominator=float(batch.dense(DENOMINATOR).sum()))
        except BaseException:  # whatever ended the step, the next one must be able to begin; raised again
            step.discard()
            raise


def _step_metrics(result: StepResult) -> dict[str, Metric]:
    """An optimiser step's own numbers beside its loss function's. Non-finite ones are counted, not averaged."""
    own = {"train/skipped_steps": Metric(total=float(not result.applied), reduction="sum")}
    if result.applied:
        own |= {
            "train/loss": Metric(total=result.loss),
            "train/gradient_norm": Metric(total=result.gradient_norm),
            "train/learning_rate": Metric(total=result.learning_rate),
        }
    return {**result.metrics, **own}


def _staleness_metrics(staleness: np.ndarray) -> dict[str, Metric]:
    return {
        "staleness/mean": Metric(total=float(staleness.sum()), count=float(len(staleness))),
        "staleness/max": Metric(total=float(staleness.max()), reduction="max"),
    }
