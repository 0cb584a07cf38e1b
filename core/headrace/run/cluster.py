"""The processes of a run: started in the order their needs allow, watched together, ended together."""

from __future__ import annotations

import asyncio
import shutil
import sys
import tempfile
from collections.abc import Callable, Coroutine
from typing import Any

from headrace.config import Job
from headrace.contract import Environment, EnvironmentContext, Launcher
from headrace.registry import build
from headrace.run.directory import RunDirectory
from headrace.run.plans import capacity
from headrace.run.seeds import derive_seed
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.messages import RolloutSetup, ScratchModel, TrainerSetup, WorkerSetup
from headrace.services.storage import StorageClient, StorageSetup
from headrace.services.supervisor import Supervisor
from headrace.wire import Client, Network

MODEL_DEADLINE = 300.0
TRAINER, STORAGE = "trainer", "storage-0"


class Cluster:
    """All nodes of one run."""

    trainer: Client
    workers: list[Client]
    storage: StorageClient
    supervisor: Supervisor
    environment: Environment
    """The controller's own copy: it is only asked for sizes of splits."""
    model_path: str

    def __init__(self, job: Job, directory: RunDirectory, *, emit: Callable[..., Any]) -> None:
        self._job = job
        self._directory = directory
        self._emit = emit
        self._sockets = tempfile.mkdtemp(prefix="headrace-")
        self._background: set[asyncio.Task[None]] = set()
        self._clients: list[Client | StorageClient] = []
        host = job.network.host if job.network.transport == "tcp" else None
        self._network = Network.create(self._sockets, host=host)
        self.fleet = Fleet(emit=emit, spawn=self._spawn, connect=self._network.client)
        self.controller = Controller(emit=emit, fleet=self.fleet)
        self._server = self._network.server(self.controller, "controller")

    # ------------------------------------------------------------ start

    async def start(self) -> None:
        """Start every node and wait until all serve."""
        job = self._job
        address = await self._server.start()
        launcher = build(job.launcher.spec)
        assert isinstance(launcher, Launcher)
        self.supervisor = Supervisor(
            launcher, network=self._network, logs=self._directory.logs, controller=address, emit=self._emit
        )
        self.controller.supervisor = self.supervisor
        names = [f"rollout-{i}" for i in range(job.rollout.instances)]
        self._emit("run_started", job=job.job.name, seed=job.job.seed, instances=names)
        await self._launch_storage()
        await self._launch_trainer()
        self.model_path = await self._model()
        await self._launch_rollouts(names)
        await self._launch_workers()
        await asyncio.to_thread(self._start_environment)
        for name in names:
            self._join(name, await self.supervisor.address(name))
        self.workers = [
            self._network.client(await self.supervisor.address(f"environment-{i}"))
            for i in range(job.environment.workers)
        ]
        self._clients += self.workers

    async def _launch_storage(self) -> None:
        setup = StorageSetup(storage=self._job.storage.spec)
        await self.supervisor.launch(STORAGE, "storage", setup, python=sys.executable, threads=1)
        self._storage_address = await self.supervisor.address(STORAGE)
        self.storage = StorageClient(self._network.client(self._storage_address))
        self._clients.append(self.storage)

    async def _launch_trainer(self) -> None:
        job = self._job
        await self.supervisor.launch(
            TRAINER,
            "trainer",
            TrainerSetup(
                transport=job.weights.spec,
                storage=self._storage_address,
                threads=job.trainer.threads,
                seed=job.job.seed,
            ),
            python=job.trainer.python or sys.executable,
            threads=job.trainer.threads,
        )
        self.trainer = self._network.client(await self.supervisor.address(TRAINER))
        self._clients.append(self.trainer)

    async def _model(self) -> str:
        """The model directory the run starts from."""
        model = self._job.model
        if model.path is not None:
            return model.path
        path = str(self._directory.models / "initial")
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

    async def _launch_rollouts(self, names: list[str]) -> None:
        rollout = self._job.rollout
        publisher = await self.trainer.call(
            "publisher_address", reply=str, deadline=MODEL_DEADLINE, awaiting="the publisher's address"
        )
        setup = RolloutSetup(
            engine=rollout.spec,
            transport=self._job.weights.spec,
            model_path=self.model_path,
            publisher=publisher,
            threads=rollout.threads,
        )
        for name in names:
            await self.supervisor.launch(
                name, "rollout", setup, python=rollout.python or sys.executable, threads=rollout.threads
            )

    async def _launch_workers(self) -> None:
        environment = self._job.environment
        python = environment.python or sys.executable
        for i in range(environment.workers):
            name = f"environment-{i}"
            setup = WorkerSetup(
                environment=environment.spec,
                model_path=self.model_path,
                seed=self._job.job.seed,
                storage=self._storage_address,
                scoring_workers=environment.scoring_workers,
                scoring_deadline=environment.scoring_deadline,
                python=python,
                log_path=str(self._directory.logs / f"{name}-scoring.log"),
            )
            await self.supervisor.launch(name, "environment", setup, python=python, threads=1)

    def _start_environment(self) -> None:
        spec = self._job.environment.spec
        environment = build(spec)
        assert isinstance(environment, Environment)
        environment.start(
            EnvironmentContext(model_path=self.model_path, seed=self._job.job.seed, directory=spec.directory)
        )
        self.environment = environment

    def _join(self, name: str, address: str) -> None:
        slots, live = capacity(self._job.rollout.spec)
        self.fleet.add(name, address, slots=slots, live_versions=live)

    # ------------------------------------------------------------ life and end

    def _spawn(self, work: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(work, name=name)
        self._background.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        failed = self.controller.failed
        if not task.cancelled() and (error := task.exception()) and not failed.done():
            failed.set_exception(error)

    async def guard(self, work: Coroutine[Any, Any, None]) -> None:
        """Run ``work`` until it ends, a node is lost, or background work fails."""
        running = asyncio.create_task(work, name="loop")
        ends: set[asyncio.Future[None]] = {running, self.supervisor.failed, self.controller.failed}
        try:
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        finally:
            if not running.done():
                running.cancel()
                await asyncio.wait({running})
        for failed in (self.supervisor.failed, self.controller.failed):
            if failed.done():
                failed.result()
        running.result()

    async def close(self) -> None:
        """End every node and forget every secret and socket."""
        for task in list(self._background):
            task.cancel()
        if self.controller.supervisor is not None:
            await self.supervisor.close()
        if self.controller.failed.done():
            self.controller.failed.exception()
        await self._server.close()
        await self.fleet.close()
        for client in self._clients:
            await client.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
