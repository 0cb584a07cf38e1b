"""Cases H01, H02, H05: samples that never finish, and processes that die or only take long."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.contract import Launcher, NodeLaunch, NodeProcess, NoSettings
from headrace.errors import DeadlineError, RunError, WireError
from headrace.services.messages import VersionCall, WorkItem
from headrace.services.node_messages import Heartbeat, Registration
from headrace.services.supervisor import CHECK_SECONDS, HEARTBEAT_DEADLINE, START_DEADLINE, NodePlan, Supervisor
from headrace.wire import Network
from support.desk import Desk, failed, played, turns


async def given(desk: Desk) -> WorkItem:
    item = await desk.work("w.0")
    assert item is not None
    return item


# ---------------------------------------------------------------- H01


async def test_H01_a_group_whose_sample_never_finishes_is_replaced_and_its_prompt_not_asked_again() -> None:
    """Task 3 is poison: whoever samples it runs into a deadline."""
    desk = await Desk(max_attempts=2, task_index=lambda group: (3, 5, 3)[group % 3]).begin()
    asked: list[int] = []
    batch = asyncio.ensure_future(desk.controller.take_batch())
    for _ in range(4):
        item = await given(desk)
        (task,) = {member.task for member in item.members}
        asked.append(task)
        await desk.say("w.0", *([failed(item, DeadlineError.__name__)] if task == 3 else played(item)))
    assert asked == [3, 3, 5, 4], "tried twice; then the other groups, one of which was to ask it again"
    (dropped,) = desk.told("group_dropped")
    assert dropped["reason"] == "DeadlineError"
    assert desk.controller.tally.failed == {"DeadlineError": 4}, "two members, two tries"
    assert (await batch).lease.groups == (1,), "the run goes on without the group"


# ---------------------------------------------------------------- H02, H05


class Process(NodeProcess):
    """Ends when it is told to."""

    def __init__(self, node: NodeLaunch) -> None:
        self.node = node
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return 17

    async def wait(self) -> int:
        return await self.over

    def terminate(self) -> None:
        self.end(-15)

    def kill(self) -> None:
        self.end(-9)

    def end(self, status: int) -> None:
        if not self.over.done():
            self.over.set_result(status)


class Nodes(Launcher):
    """A supervised node ``rollout-0``; ``lost``: its losses, as the run hears of them."""

    def __init__(self, directory: Path) -> None:
        super().__init__(NoSettings())
        self.processes: list[Process] = []
        self.lost: list[RunError] = []
        self.events: list[str] = []
        self.supervisor = Supervisor(
            self,
            network=Network.create(str(directory), host=None),
            logs=directory,
            controller="",
            max_restarts=1,
            emit=lambda kind, **_: self.events.append(kind),
            lost=lambda name, role, process, error: self.lost.append(error),
            fail=lambda error: None,
        )

    async def launch(self, node: NodeLaunch) -> NodeProcess:
        self.processes.append(Process(node))
        return self.processes[-1]

    async def serve(self, start: int) -> str:
        """The newest process says that it serves, and somebody asks where."""
        node = f"rollout-0.{start}"
        self.supervisor.register(Registration(node=node, pid=17, address=f"at {node}"))
        return await self.supervisor.address("rollout-0")


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path)
    setup = VersionCall(version=0)
    await nodes.supervisor.launch(
        NodePlan(name="rollout-0", role="rollout", setup=lambda: setup, python="python", threads=1)
    )
    yield nodes
    await nodes.supervisor.close()


async def test_H02_a_producer_that_dies_is_started_again_once_and_then_ends_the_run_in_its_own_words(
    nodes: Nodes, tmp_path: Path
) -> None:
    await nodes.serve(0)
    nodes.processes[0].end(-9)
    await turns()
    assert "killed by signal 9" in nodes.lost[0].message
    restarted = asyncio.ensure_future(nodes.supervisor.restart("rollout-0"))
    await turns()
    assert await nodes.serve(1) == await restarted == "at rollout-0.1"
    (tmp_path / "rollout-0.log").write_text("Traceback\nValueError: the original error\n")
    nodes.processes[1].end(1)
    await turns()
    with pytest.raises(RunError, match="lost 2 times") as ended:
        await nodes.supervisor.restart("rollout-0")
    assert "ValueError: the original error" in ended.value.origin
    assert "max_restarts" in ended.value.fix


async def test_H05_an_instance_killed_in_the_middle_of_a_batch_leaves_the_batch_to_the_other() -> None:
    desk = await Desk(batch_groups=2).begin()
    batch = asyncio.ensure_future(desk.controller.take_batch())
    items = [await given(desk) for _ in range(2)]
    address, displaced = desk.fleet.lost("rollout-0")
    desk.controller.instance_lost(displaced)
    assert len(displaced) == 2
    for trajectory in displaced:
        assert desk.flow.instance_of(trajectory) in ("", "rollout-1")
    assert "rollout-0" not in desk.flow.hosting(0)
    for item in items:
        await desk.say("w.0", *played(item))
    assert (await batch).lease.groups == (0, 1)
    assert {e["reason"] for e in desk.told("trajectory_failed")} == {"instance_lost"}
    assert not desk.told("group_dropped")
    with pytest.raises(WireError):
        await desk.peers[address].call("generate")


def silent(nodes: Nodes, seconds: float) -> None:
    for _ in range(int(seconds / CHECK_SECONDS)):
        nodes.supervisor.check_silence()


async def test_H05_an_engine_that_takes_long_to_start_is_not_killed_and_one_that_falls_silent_is(nodes: Nodes) -> None:
    first = nodes.processes[0]
    silent(nodes, START_DEADLINE)
    assert not first.over.done(), "it compiles"
    await nodes.serve(0)
    nodes.supervisor.heartbeat(Heartbeat(node="rollout-0.0", loop_lag=0.0))
    silent(nodes, HEARTBEAT_DEADLINE - 5)
    assert not first.over.done()
    silent(nodes, 10)
    await turns()
    assert "no heartbeat" in nodes.lost[0].message
