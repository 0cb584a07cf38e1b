"""What becomes of the run when a node is lost.

| lost               | what goes on                                                                       |
|--------------------|------------------------------------------------------------------------------------|
| rollout instance   | its trajectories are generated again elsewhere, under the version they started with; it |
|                    | is started again, unless it was to leave                                             |
| environment worker | others, or its successor, play its groups again                                    |
| storage unit       | the groups it held are dropped by name; what is under way goes to another unit     |
| separate stage     | what it held is ready again, and its successor's                                   |
| trainer            | nothing: the run ends, to be resumed from its last checkpoint; only one that was   |
|                    | killed before it served is started again, by the supervisor                        |

Invariant: from the moment in which a loss is known nothing more is given to the lost process; when its successor
serves, nobody waits for the old one any more.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any, Protocol

from headrace.dataplane import AsyncPlane, LedgerService
from headrace.errors import RunError
from headrace.run.scaling import Scaling
from headrace.services.controller import Controller
from headrace.services.fleet import Fleet
from headrace.services.messages import PeerCall
from headrace.services.stages import Stages
from headrace.services.supervisor import Supervisor
from headrace.services.workers import Workers
from headrace.wire import Client

TELL_DEADLINE = 60.0


class Nodes(Protocol):
    """What recovery works on."""

    controller: Controller
    fleet: Fleet
    workers: Workers
    stages: Stages
    ledger: LedgerService
    plane: AsyncPlane
    units: dict[str, str]
    """Storage unit → where it serves."""
    trainer: Client
    supervisor: Supervisor
    scaling: Scaling

    def join(self, name: str, address: str) -> None: ...

    def fail(self, error: BaseException) -> None: ...

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> object: ...


class Recovery:
    """One per run, once every node serves."""

    def __init__(self, nodes: Nodes) -> None:
        self._nodes = nodes
        self._lost_instances: list[str] = []
        """Addresses where no instance serves any more."""

    def lost(self, name: str, role: str, process: str, error: RunError) -> None:
        """A node that served is gone."""
        nodes = self._nodes
        if role == "rollout":
            address, displaced = nodes.fleet.lost(name)
            self._lost_instances.append(address)
            nodes.controller.instance_lost(displaced)
            nodes.spawn(self._rollout(name, address), f"recover {name}")
        elif role == "environment":
            nodes.controller.worker_lost(process)
            nodes.spawn(self._worker(name), f"recover {name}")
        elif role == "storage":
            address = nodes.units.pop(name)
            nodes.ledger.lose(address)
            nodes.spawn(self._storage(name, address), f"recover {name}")
        elif role == "stage":
            nodes.ledger.forsake(name)
            nodes.spawn(self._stage(name), f"recover {name}")
        else:
            nodes.fail(error)

    async def _rollout(self, name: str, address: str) -> None:
        nodes = self._nodes
        await self._tell_that_nobody_serves(address)
        if not nodes.scaling.wants(name):
            await nodes.scaling.dismiss(name)
            return
        joined = await nodes.supervisor.restart(name)
        if nodes.scaling.wants(name):
            nodes.join(name, joined)
        else:
            await nodes.scaling.dismiss(name)

    async def _worker(self, name: str) -> None:
        nodes = self._nodes
        await nodes.workers.lost(name)
        nodes.workers.add(name, await nodes.supervisor.restart(name))
        # It asked for work before it could be told anything.
        for address in list(self._lost_instances):
            await self._tell_that_nobody_serves(address)

    async def _storage(self, name: str, address: str) -> None:
        """Whoever waits for the unit turns to others, or waits for the next one at the ledger."""
        nodes, lost = self._nodes, PeerCall(address=address)
        await nodes.plane.lost(address)
        await nodes.trainer.call(
            "unit_lost", lost, deadline=TELL_DEADLINE, awaiting="the trainer to give a storage unit up"
        )
        await nodes.workers.tell("unit_lost", lost, awaiting="to give a storage unit up")
        await nodes.stages.tell("unit_lost", lost, awaiting="to give a storage unit up")
        joined = PeerCall(address=await nodes.supervisor.restart(name))
        nodes.units[name] = joined.address
        await nodes.workers.tell("unit_joined", joined, awaiting="to use a storage unit")
        await nodes.stages.tell("unit_joined", joined, awaiting="to use a storage unit")

    async def _stage(self, name: str) -> None:
        nodes = self._nodes
        await nodes.stages.lost(name)
        await nodes.stages.add(name, await nodes.supervisor.restart(name))

    async def _tell_that_nobody_serves(self, address: str) -> None:
        peer = PeerCall(address=address)
        await self._nodes.workers.tell("instance_lost", peer, awaiting=f"to give the instance at {address} up")
