"""The processes of a run: started in the order their needs allow, watched together, ended together."""

from __future__ import annotations

import asyncio
import functools
import sys
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from headrace.config import Job, transport_of
from headrace.contract import Environment, Launcher
from headrace.dataplane import AsyncPlane, LedgerService
from headrace.dataplane.metrics import data_plane_metrics
from headrace.errors import RunError
from headrace.flow.autoscale import Autoscaler
from headrace.graph.declared import rollout_capabilities
from headrace.observe.exposition import MetricsPage
from headrace.registry import build
from headrace.run.autoscaling import Autoscaling
from headrace.run.control import Access, offer, withdraw
from headrace.run.directory import RunDirectory
from headrace.run.environments import started
from headrace.run.plans import aligned_scheme, self_check_tolerance, stage_nodes
from headrace.run.recovery import Recovery
from headrace.run.room import watch_room
from headrace.run.scaling import Scaling
from headrace.run.seeds import derive_seed
from headrace.run.tasks import TasksIdentity, identify
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.messages import RolloutSetup, ScratchModel, TrainerSetup, WorkerSetup
from headrace.services.stage_messages import StageSetup
from headrace.services.stages import Stages
from headrace.services.storage import StorageSetup
from headrace.services.supervisor import NodePlan, Supervisor
from headrace.services.workers import Workers
from headrace.wire import Client, Network, OwnDirectory

T = TypeVar("T")

MODEL_DEADLINE = 300.0
TRAINER = "trainer"
"""The node, and its role."""


class Cluster:
    """All nodes of one run."""

    trainer: Client
    plane: AsyncPlane
    supervisor: Supervisor
    environment: Environment
    """The controller's own copy: it is only asked which tasks there are."""
    tasks: TasksIdentity
    model_path: str

    def __init__(
        self, job: Job, directory: RunDirectory, *, emit: Callable[..., Any], notice: Callable[[str], None]
    ) -> None:
        self._job = job
        self._directory = directory
        self._emit = emit
        self._notice = notice
        self._sockets = OwnDirectory(tempfile.gettempdir(), "headrace-")
        self._background: set[asyncio.Task[None]] = set()
        self._clients: list[Client | AsyncPlane] = []
        host = job.network.host if job.network.transport == "tcp" else None
        self._network = Network.create(self._sockets.path, host=host)
        self.fleet = Fleet(
            emit=emit,
            spawn=self.spawn,
            connect=self._network.client,
            temperature=job.rollout.temperature,
            tolerance=self_check_tolerance(job),
        )
        self.workers = Workers(self._network.client)
        self.stages = Stages(self._network.client)
        self.ledger = LedgerService(connect=self._network.client, watched=True)
        self.units: dict[str, str] = {}
        """Storage unit → where it serves."""
        self.controller = Controller(
            emit=emit,
            fleet=self.fleet,
            ledger=self.ledger,
            max_failed_share=job.environment.max_failed_share,
            max_attempts=job.environment.max_attempts,
            notice=notice,
        )
        self._names = [f"rollout-{i}" for i in range(job.rollout.instances)]
        self.scaling = Scaling(self, self._names, launch=self._launch_rollout)
        self.fleet.left = self.scaling.left
        self._recovery: Recovery | None = None
        self._lost_early: list[tuple[str, str, str, RunError]] = []
        """What was lost before everything served."""
        served = (self.controller, self.ledger, self.stages, self.scaling)
        self._server = self._network.server(*served, name="controller")
        self._page: MetricsPage | None = None
        if job.network.metrics:
            self._page = MetricsPage(job.network.metrics, lambda: data_plane_metrics(self.ledger, self._server))

    # ------------------------------------------------------------ start

    async def start(self) -> None:
        """Start every node and wait until all serve."""
        job = self._job
        address = self._address = await self._server.start()
        if self._page is not None:
            await self._page.start()
        launcher = build(job.launcher.spec)
        assert isinstance(launcher, Launcher)
        self.supervisor = Supervisor(
            launcher,
            network=self._network,
            logs=self._directory.logs,
            controller=address,
            max_restarts=job.launcher.max_restarts,
            emit=self._emit,
            lost=self._lost,
            fail=self.fail,
        )
        self.controller.supervisor = self.supervisor
        await self._launch_units()
        if job.storage.capacity:
            self.spawn(watch_room(self.ledger, lambda: self.controller.waits_for_batch, self._notice), "watch room")
        await self._launch_trainer()
        self.model_path = await self._model()
        await self._launch_rollouts()
        workers = await self._launch_workers()
        stages = await self._launch_stages()
        await asyncio.to_thread(self._start_environment)
        for name in self._names:
            self.join(name, await self.supervisor.started(name))
        for name in workers:
            self.workers.add(name, await self.supervisor.started(name))
        for name in stages:
            await self.stages.add(name, await self.supervisor.started(name))
        self._recovery = Recovery(self)
        for loss in self._lost_early:
            self._recovery.lost(*loss)
        if (wanted := job.rollout.autoscale) is not None:
            policy = Autoscaler(least=wanted.min, most=wanted.max)
            watching = Autoscaling(policy, self.fleet, self.scaling, notice=self._notice)
            self.spawn(watching.watch(), "autoscale")
        offer(self._directory, Access(controller=address, network=self._network))
        self.spawn(self.fleet.rebalance_regularly(), "rebalance")

    async def _launch_units(self) -> None:
        for number in range(self._job.storage.units):
            name = f"storage-{number}"
            await self.supervisor.launch(
                NodePlan(
                    name=name,
                    role="storage",
                    setup=lambda: StorageSetup(self._job.storage.spec, self._job.storage.capacity),
                    python=sys.executable,
                    threads=1,
                )
            )
        for number in range(self._job.storage.units):
            name = f"storage-{number}"
            self.units[name] = await self.supervisor.started(name)
        self.plane = AsyncPlane(self._address, name="controller", connect=self._network.client)
        self._clients.append(self.plane)

    async def _launch_trainer(self) -> None:
        job = self._job
        await self.supervisor.launch(
            NodePlan(
                name=TRAINER,
                role="trainer",
                setup=lambda: TrainerSetup(
                    transport=transport_of(job),
                    ledger=self._address,
                    threads=job.trainer.threads,
                    seed=job.job.seed,
                    dumps=str(self._directory.path / "not_finite"),
                    quantization=job.quantization.spec if job.quantization else None,
                    align=job.quantization is not None and job.quantization.align,
                ),
                python=job.trainer.python or sys.executable,
                threads=job.trainer.threads,
            )
        )
        self.trainer = self._network.client(await self.supervisor.started(TRAINER))
        self._clients.append(self.trainer)

    async def _model(self) -> str:
        """The model directory the run starts from."""
        model = self._job.model
        if model.path is not None:
            return model.path
        path = str(self._directory.models / "initial")
        if self._directory.has_initial_model():
            return path  # of the run that is resumed
        await self.trainer.call(
            "create_model",
            ScratchModel(
                engine=self._job.phases[0].trainer,
                path=path,
                settings=model.scratch or {},
                seed=derive_seed(self._job.job.seed, "model"),
            ),
            deadline=MODEL_DEADLINE,
            awaiting="the trainer to create the model",
        )
        return path

    async def _launch_rollouts(self) -> None:
        self._publisher = await self.trainer.call(
            "publisher_address", reply=str, deadline=MODEL_DEADLINE, awaiting="the publisher's address"
        )
        for name in self._names:
            await self._launch_rollout(name)

    async def _launch_rollout(self, name: str) -> None:
        rollout = self._job.rollout
        await self.supervisor.launch(
            NodePlan(
                name=name,
                role="rollout",
                setup=lambda: RolloutSetup(
                    engine=rollout.spec,
                    transport=transport_of(self._job),
                    model_path=self.model_path,
                    publisher=self._publisher,
                    threads=rollout.threads,
                    quantization=self._job.quantization.spec if self._job.quantization else None,
                ),
                python=rollout.python or sys.executable,
                threads=rollout.threads,
            )
        )

    async def _launch_workers(self) -> list[str]:
        names = [f"environment-{i}" for i in range(self._job.environment.workers)]
        for name in names:
            await self.supervisor.launch(
                NodePlan(
                    name=name,
                    role="environment",
                    setup=functools.partial(self._worker_setup, name),
                    python=self._job.environment.python or sys.executable,
                    threads=1,
                )
            )
        return names

    async def _launch_stages(self) -> tuple[str, ...]:
        job, names = self._job, stage_nodes(self._job)
        for name in names:
            await self.supervisor.launch(
                NodePlan(
                    name=name,
                    role="stage",
                    setup=lambda: StageSetup(
                        ledger=self._address,
                        threads=job.trainer.threads,
                        seed=job.job.seed,
                        quantization=aligned_scheme(job),
                    ),
                    python=job.trainer.python or sys.executable,
                    threads=job.trainer.threads,
                )
            )
        return names

    def _worker_setup(self, name: str) -> WorkerSetup:
        environment = self._job.environment
        return WorkerSetup(
            environment=environment.spec,
            model_path=self.model_path,
            seed=self._job.job.seed,
            ledger=self._address,
            episode_deadline=environment.episode_deadline,
            scoring_workers=environment.scoring_workers,
            scoring_deadline=environment.scoring_deadline,
            python=environment.python or sys.executable,
            log_path=str(self._directory.logs / f"{name}-scoring.log"),
        )

    def _start_environment(self) -> None:
        job = self._job
        self.environment = started(job.environment.spec, model_path=self.model_path, seed=job.job.seed)
        self.tasks = identify(self.environment)

    def join(self, name: str, address: str) -> None:
        """A rollout node serves."""
        able = rollout_capabilities(self._job.rollout.spec)
        self.fleet.join(name, address, slots=able.slots, live_versions=able.live_versions, migrates=able.kv_migration)

    # ------------------------------------------------------------ life and end

    def _lost(self, name: str, role: str, process: str, error: RunError) -> None:
        """What is lost before everything serves is seen to when everything does; without a trainer that is never."""
        if self._recovery is not None:
            self._recovery.lost(name, role, process, error)
        elif role == TRAINER:
            self.fail(error)
        else:
            self._lost_early.append((name, role, process, error))

    def fail(self, error: BaseException) -> None:
        """The run ends with this."""
        if not self.controller.failed.done():
            self.controller.failed.set_exception(error)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run work in the background; the run ends with its failure."""
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()):
            self.fail(error)

    async def guard(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` until it ends, a node is lost for good, or background work fails."""
        running = asyncio.create_task(work, name="loop")
        ends: set[asyncio.Future[Any]] = {running, self.controller.failed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        if self.controller.failed.done():
            self.controller.failed.result()
        return running.result()

    async def close(self) -> None:
        """End every node and forget every secret and socket."""
        withdraw(self._directory)
        await self._end_background()
        if self.controller.supervisor is not None:
            await self.supervisor.close()
        if self._page is not None:
            await self._page.close()
        await self._server.close()
        await self.ledger.close()
        await self.fleet.close()
        await self.workers.close()
        await self.stages.close()
        for client in self._clients:
            await client.close()
        self._sockets.close()
        await self._end_background()  # what was begun meanwhile has lost its client
        if self.controller.failed.done():
            self.controller.failed.exception()

    async def _end_background(self) -> None:
        while tasks := list(self._background):
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
