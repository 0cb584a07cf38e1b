"""A node process: ``python -m headrace.services.node SPEC``. Serves one role until told to end.

Invariant: a node never outlives its run. It dies with its launcher, ends on SIGTERM, and ends by itself when
the controller stops answering heartbeats.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.contract import CONTRACT_VERSION, TransportContext
from headrace.errors import DeadlineError, HeadraceError
from headrace.services.handshake import require_contract
from headrace.services.node_messages import Heartbeat, NodeSpec, Registration
from headrace.wire import Client, rpc

HEARTBEAT_SECONDS = 1.0
LOOKS = 10
"""At the event loop's lateness, per heartbeat: what blocks it for longer than the time between two is seen."""
CONTROLLER_DEADLINE = 60.0
"""A controller silent for this long is gone. One that was stopped for less finds its nodes alive; of its death most
launchers' nodes learn from the kernel, at once."""

log = logging.getLogger("headrace.node")


class NodeService(ABC):
    """Base of the roles' services: ``start``, ``close``, and ``@rpc`` methods."""

    def __init__(self, spec: NodeSpec) -> None:
        self.spec = spec
        self.name = spec.name
        self.network = spec.network
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        """Set when a background task failed: the node then ends with that error."""
        self.kv_used: float | None = None
        """Told with every heartbeat."""
        self.parked = 0
        """Told with the next heartbeat, which begins the count anew."""
        self._tasks: set[asyncio.Task[None]] = set()

    @abstractmethod
    async def start(self) -> None:
        """Make the role usable."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything; called once."""

    @property
    def served(self) -> tuple[object, ...]:
        """Whose rpc methods the node serves."""
        return (self,)

    def serving(self, refused: Mapping[str, int]) -> None:  # noqa: B027 - most roles need do nothing
        """The node's server counts in ``refused`` what it turns away."""

    async def reached(self, address: str) -> None:  # noqa: B027 - most roles need do nothing
        """The node serves at ``address``, and the controller is about to hear of it."""

    @rpc
    async def ping(self, request: None) -> None:
        """Answers while the event loop turns."""
        return

    def transport_context(self) -> TransportContext:
        """Where a weight transport of this node opens its sockets."""
        network = self.network
        keys = None if network.keys is None else network.keys.to_dict()
        return TransportContext(directory=network.directory, name=self.name, host=network.host, keys=keys)

    def supervise(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        """Run background work whose failure ends the node."""
        task = asyncio.create_task(work, name=name)
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) and not self.failed.done():
            self.failed.set_exception(error)

    async def cancel_background(self) -> None:
        """End background work."""
        for task in (tasks := list(self._tasks)):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self.failed.done():
            self.failed.exception()


def service_class(role: str) -> type[NodeService]:
    """The service of a role; imported only in the process that runs it."""
    if role == "rollout":
        from headrace.services.rollout import RolloutService

        return RolloutService
    if role == "trainer":
        from headrace.services.trainer import TrainerService

        return TrainerService
    if role == "environment":
        from headrace.services.worker import WorkerService

        return WorkerService
    if role == "storage":
        from headrace.services.storage import StorageService

        return StorageService
    if role == "stage":
        from headrace.services.stage import StageService

        return StageService
    raise ValueError(f"no service for role {role!r}")


async def _beat(service: NodeService, controller: Client) -> None:
    """Heartbeats until the controller stops answering."""
    lag = 0.0
    while True:
        parked, service.parked = service.parked, 0
        await controller.call(
            "heartbeat",
            Heartbeat(node=service.spec.id, loop_lag=lag, kv_used=service.kv_used, parked=parked),
            deadline=CONTROLLER_DEADLINE,
            awaiting="the controller's answer to a heartbeat",
        )
        lag = await _lateness(HEARTBEAT_SECONDS)


async def _lateness(seconds: float) -> float:
    """Let ``seconds`` pass; by how many the event loop was late meanwhile, at most."""
    loop = asyncio.get_running_loop()
    late = 0.0
    for _ in range(LOOKS):
        due = loop.time() + seconds / LOOKS
        await asyncio.sleep(seconds / LOOKS)
        late = max(late, loop.time() - due)
    return late


async def serve(spec: NodeSpec) -> None:
    """Run one node to its end."""
    require_contract(spec.name, of_node=CONTRACT_VERSION, of_controller=spec.contract)
    service = service_class(spec.role)(spec)
    server = spec.network.server(*service.served, name=spec.id, log=spec.log)
    service.serving(server.refused)
    controller = spec.network.client(spec.controller)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        await service.start()
        address = await server.start()
        await service.reached(address)
        await controller.call(
            "register",
            Registration(node=spec.id, pid=os.getpid(), address=address),
            deadline=CONTROLLER_DEADLINE,
            awaiting="the controller to accept this node",
        )
        beat = asyncio.create_task(_beat(service, controller))
        stopped = asyncio.create_task(stop.wait())
        ends: set[asyncio.Future[Any]] = {beat, stopped, service.failed}
        await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        stopped.cancel()
        for ended in (service.failed, beat):
            if ended.done():
                beat.cancel()  # a node that cannot end either is silent, and is killed for it
                ended.result()
        beat.cancel()
    finally:
        await server.close()
        await service.cancel_background()
        await service.close()
        await controller.close()


def main(spec_path: str) -> int:
    """Entry point. Exit status 0 after SIGTERM, 1 after an error that is printed to the node's log."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    spec = msgspec.json.decode(Path(spec_path).read_bytes(), type=NodeSpec)
    try:
        asyncio.run(serve(spec))
    except DeadlineError as error:
        log.error("node %s ends: %s", spec.name, error)
        return 1
    except HeadraceError as error:
        log.error("node %s failed: %s", spec.name, error, exc_info=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
