"""What everybody is told when a node is lost, also of a loss while another node starts."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any

from headrace.dataplane.messages import Join
from headrace.errors import RunError
from headrace.registry import PluginSpec
from headrace.run.recovery import Recovery
from headrace.run.scaling import Scaling
from headrace.services.node_messages import node_id
from headrace.services.stage_messages import StagePhase
from headrace.services.stages import Stages
from headrace.services.workers import Workers
from support.desk import Desk, Peer, turns

TOLD = frozenset({"instance_lost", "unit_lost", "unit_joined", "begin_phase"})


class Nodes:
    """Two instances, two workers, a stage, storage units and a trainer that hear at once what they are told; a lost
    node comes back when the test says so."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.controller, self.fleet = desk.controller, desk.fleet
        self.peers: dict[str, Peer] = {}
        self.workers = Workers(self._peer)  # type: ignore[arg-type]  # calls only
        self.stages = Stages(self._peer)  # type: ignore[arg-type]  # calls only
        self.ledger = desk.ledger
        self.units = {"storage-0": "storage-0.0", "storage-1": "storage-1.0"}
        self.plane: Any = self
        self.given_up: list[str] = []
        self.trainer: Any = self._peer("trainer")
        self.supervisor: Any = self
        self.failures: list[BaseException] = []
        self._starting: dict[str, asyncio.Future[str]] = {}
        self.scaling = Scaling(self, ["rollout-0", "rollout-1"], launch=self._launch)
        for name in ("environment-0", "environment-1"):
            self.workers.add(name, f"{name}.0")
        self.recovery = Recovery(self)

    def _peer(self, address: str) -> Peer:
        return self.peers.setdefault(address, Peer(address, TOLD))

    def join(self, name: str, address: str) -> None:
        self.fleet.join(name, address, slots=8, live_versions=2)

    def fail(self, error: BaseException) -> None:
        self.failures.append(error)

    def spawn(self, work: Coroutine[Any, Any, None], name: str) -> asyncio.Task[None]:
        return self.desk.spawn(work, name)

    async def _launch(self, name: str) -> None:
        raise AssertionError(name)

    async def lost(self, address: str) -> None:
        self.given_up.append(address)

    async def restart(self, name: str) -> str:
        self._starting[name] = asyncio.get_running_loop().create_future()
        return await self._starting[name]

    def lose(self, name: str, start: int = 0) -> None:
        role = name.rpartition("-")[0] or "stage"
        self.recovery.lost(name, role, node_id(name, start), RunError(f"node {name} is gone"))

    async def serves(self, name: str, start: int = 1) -> None:
        """A lost node is back."""
        await turns()
        self._starting[name].set_result(node_id(name, start))
        await turns()
        assert self.desk.failures == []

    def told(self, address: str) -> list[tuple[str, str]]:
        return [(method, request.address) for method, request in self.peers[address].asked]


async def nodes() -> Nodes:
    around = Nodes(await Desk().begin())
    await around.stages.add("reference", "reference.0")
    return around


async def test_every_worker_hears_that_nobody_serves_where_a_lost_instance_was() -> None:
    around = await nodes()
    around.lose("rollout-0")
    await around.serves("rollout-0")
    for worker in ("environment-0.0", "environment-1.0"):
        assert around.told(worker) == [("instance_lost", "rollout-0.0")]
    assert around.fleet.address("rollout-0") == "rollout-0.1"


async def test_a_worker_that_starts_while_an_instance_is_lost_hears_of_it_too() -> None:
    around = await nodes()
    around.lose("environment-0")
    await turns()
    around.lose("rollout-0")
    await around.serves("environment-0")
    assert ("instance_lost", "rollout-0.0") in around.told("environment-0.1")


async def test_a_lost_storage_unit_is_given_up_by_all_who_use_it_before_another_is_started() -> None:
    around = await nodes()
    around.lose("storage-0")
    await turns()
    for user in ("trainer", "environment-0.0", "environment-1.0", "reference.0"):
        assert around.told(user) == [("unit_lost", "storage-0.0")]
    assert around.given_up == ["storage-0.0"]
    assert around.ledger.units(None) == ["", "storage-1.0"]
    await around.serves("storage-0")
    assert around.units["storage-0"] == "storage-0.1"
    for worker in ("environment-0.0", "environment-1.0"):
        assert around.told(worker)[1:] == [("unit_joined", "storage-0.1")], "or it would never get a row"


async def test_a_storage_unit_lost_twice_is_given_up_twice() -> None:
    around = await nodes()
    around.lose("storage-0")
    await around.serves("storage-0")
    around.ledger.join(Join("storage-0.1", "another"))
    around.lose("storage-0", 1)
    await around.serves("storage-0", 2)
    assert around.units["storage-0"] == "storage-0.2"
    for user in ("trainer", "environment-0.0"):
        lost = [address for method, address in around.told(user) if method == "unit_lost"]
        assert lost == ["storage-0.0", "storage-0.1"]


async def test_a_node_that_is_lost_again_while_others_are_told_of_it_keeps_nobody_waiting() -> None:
    around = await nodes()
    around.lose("environment-0")
    await around.serves("environment-0")
    around.lose("environment-0", 1)
    around.lose("environment-1")
    await around.serves("environment-0", 2)
    await around.serves("environment-1")
    assert around.desk.failures == []


async def test_the_successor_of_a_lost_stage_begins_the_phase_that_runs() -> None:
    around = await nodes()
    plugin = PluginSpec(role="algorithm", use="grpo")
    phase = StagePhase(
        partition="rl",
        reads=("tokens",),
        writes=("reference_logprobs",),
        engine=plugin,
        algorithm=plugin,
        model_path="",
        temperature=1.0,
        lockstep=False,
        tokens=8,
    )
    await around.stages.begin({"reference": phase})
    around.lose("reference")
    await around.serves("reference")
    for process in ("reference.0", "reference.1"):
        assert around.peers[process].asked == [("begin_phase", phase)]


async def test_a_lost_trainer_ends_the_run() -> None:
    around = await nodes()
    around.recovery.lost("trainer", "trainer", "trainer.0", RunError("node trainer is gone"))
    assert [str(error) for error in around.failures] == ["node trainer is gone"]
