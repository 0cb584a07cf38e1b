"""What becomes of the run when a node is lost.

| lost               | what goes on                                                                       |
|--------------------|------------------------------------------------------------------------------------|
| rollout instance   | its trajectories are generated again elsewhere, under the version they started with |
| environment worker | others, or its successor, play its groups again                                    |
| storage unit       | the groups it held are dropped by name; what is under way goes to its successor    |
| trainer            | nothing: the run ends, to be resumed from its last checkpoint                      |

Invariant: when a lost node's successor serves, nobody waits for the old process any more.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from headrace.errors import HeadraceError, RunError
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.messages import PeerCall
from headrace.services.storage import StorageClient
from headrace.services.supervisor import Supervisor
from headrace.services.workers import Workers
from headrace.wire import Client

MOVE_DEADLINE = 60.0


class Nodes(Protocol):
    """What recovery works on."""

    controller: Controller
    fleet: Fleet
    workers: Workers
    storage: StorageClient
    trainer: Client
    supervisor: Supervisor

    def join(self, name: str, address: str) -> None: ...

    def fail(self, error: HeadraceError) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> None: ...


class Recovery:
    """One per run, once every node serves."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes

    def lost(self, name: str, role: str, process: str, error: RunError) -> None:
        """A node that served is gone."""
        nodes = self._nodes
        if role == "rollout":
            nodes.spawn(self._rollout(name), f"recover {name}")
        elif role == "environment":
            nodes.spawn(self._worker(name, process), f"recover {name}")
        elif role == "storage":
            nodes.spawn(self._storage(name), f"recover {name}")
        else:
            nodes.fail(error)

    async def _rollout(self, name: str) -> None:
        nodes = self._nodes
        address, displaced = await nodes.fleet.lost(name)
        nodes.controller.instance_lost(displaced)
        await nodes.workers.tell("instance_lost", PeerCall(address=address), awaiting=f"to give {name} up")
        nodes.join(name, await nodes.supervisor.restart(name))

    async def _worker(self, name: str, process: str) -> None:
        nodes = self._nodes
        await nodes.workers.lost(name)
        nodes.controller.worker_lost(process)
        nodes.workers.add(name, await nodes.supervisor.restart(name))
        await self._tell_where_storage_is()  # it may have moved while this one started

    async def _storage(self, name: str) -> None:
        nodes = self._nodes
        nodes.controller.storage_lost()
        address = await nodes.supervisor.restart(name)
        nodes.controller.storage = address
        await nodes.storage.moved(address)
        await nodes.trainer.call(
            "storage_moved",
            PeerCall(address=address),
            deadline=MOVE_DEADLINE,
            awaiting="the trainer to turn to another storage unit",
        )
        await self._tell_where_storage_is()

    async def _tell_where_storage_is(self) -> None:
        peer = PeerCall(address=self._nodes.storage.address)
        await self._nodes.workers.tell("storage_moved", peer, awaiting="to turn to another storage unit")
