"""What the supervisor writes for a node is for that node alone; and whether a node is lost, and started again."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.contract import CONTRACT_VERSION, Launcher, NodeLaunch, NodeProcess, NoSettings
from headrace.dataplane import LedgerService
from headrace.dataplane.ledger import WATCH_SECONDS
from headrace.dataplane.messages import Join
from headrace.errors import PluginError, RunError
from headrace.services import node
from headrace.services.messages import VersionCall
from headrace.services.node_messages import Heartbeat, NodeSpec, Registration
from headrace.services.supervisor import CHECK_SECONDS, HEARTBEAT_DEADLINE, NodePlan, Supervisor
from headrace.wire import Network
from support.desk import Peer, turns


class Ended(NodeProcess):
    """A process that is over at once."""

    pid = 1

    async def wait(self) -> int:
        return 0

    def terminate(self) -> None:
        pass

    def kill(self) -> None:
        pass


class Recorder(Launcher):
    """Starts nothing; remembers what it was asked for."""

    def __init__(self) -> None:
        super().__init__(NoSettings())
        self.launches: list[NodeLaunch] = []

    async def launch(self, node: NodeLaunch) -> NodeProcess:
        self.launches.append(node)
        return Ended()


def read_private(path: Path) -> NodeSpec:
    """The spec, in a file that only its owner may read."""
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    return msgspec.json.decode(path.read_bytes(), type=NodeSpec)


@pytest.fixture
def lenient_umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.usefixtures("lenient_umask")
async def test_only_the_owner_reads_a_node_s_spec_and_only_there_are_the_keys(tmp_path: Path) -> None:
    events: list[dict[str, Any]] = []
    network = Network.create(str(tmp_path), host="127.0.0.1")
    launcher = Recorder()
    supervisor = Supervisor(
        launcher,
        network=network,
        logs=tmp_path,
        controller="tcp://127.0.0.1:1",
        max_restarts=0,
        emit=lambda kind, **fields: events.append(fields),
        lost=lambda *_: None,
        fail=lambda _: None,
    )
    plan = NodePlan(name="storage-0", role="storage", setup=lambda: VersionCall(version=0), python="python", threads=1)
    await supervisor.launch(plan)
    await supervisor.close()
    (launch,) = launcher.launches
    spec = read_private(Path(launch.arguments[-1]))
    assert spec.network == network
    assert spec.log == launch.log_path, "a call that raises there tells where its traceback is"
    assert network.keys is not None
    for secret in (network.keys.server_secret, network.keys.client_secret):
        assert not any(secret in text for text in (repr(launch), repr(events), repr(spec)))


# ---------------------------------------------------------------- lost nodes


class Process(NodeProcess):
    """Ends when the test says so."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        self.killed = False
        self.over: asyncio.Future[int] = asyncio.get_running_loop().create_future()

    @property
    def pid(self) -> int:
        return self._pid

    async def wait(self) -> int:
        return await self.over

    def terminate(self) -> None:
        self.end(-15)

    def kill(self) -> None:
        self.killed = True
        self.end(-9)

    def end(self, status: int) -> None:
        if not self.over.done():
            self.over.set_result(status)


class Nodes(Launcher):
    """A supervisor of one node, whose processes end and register when the test says so."""

    def __init__(self, directory: Path, *, max_restarts: int = 2) -> None:
        super().__init__(NoSettings())
        self.processes: list[Process] = []
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.lost: list[tuple[str, str]] = []
        self.fixes: list[str] = []
        self.failures: list[BaseException] = []
        self.supervisor = Supervisor(
            self,
            network=Network.create(str(directory), host=None),
            logs=directory,
            controller="",
            max_restarts=max_restarts,
            emit=lambda kind, **fields: self.emit(kind, **fields),
            lost=self.told,
            fail=self.failures.append,
        )

    def told(self, name: str, role: str, process: str, error: RunError) -> None:
        self.lost.append((process, error.message))
        self.fixes.append(error.fix)

    async def launch(self, node: NodeLaunch) -> NodeProcess:
        self.processes.append(Process(len(self.processes)))
        return self.processes[-1]

    def emit(self, kind: str, **fields: Any) -> None:
        self.events.append((kind, fields))

    async def start(self) -> None:
        await self.supervisor.launch(PLAN)

    def register(self, start: int = 0, contract: int = CONTRACT_VERSION) -> None:
        node = f"storage-0.{start}"
        self.supervisor.register(Registration(node=node, pid=start, address=f"at {node}", contract=contract))


PLAN = NodePlan(name="storage-0", role="storage", setup=lambda: VersionCall(version=0), python="python", threads=1)


@pytest.fixture
async def nodes(tmp_path: Path) -> AsyncIterator[Nodes]:
    nodes = Nodes(tmp_path)
    await nodes.start()
    yield nodes
    await nodes.supervisor.close()


async def test_a_node_that_served_and_is_gone_is_lost_once_with_its_cause(nodes: Nodes) -> None:
    nodes.register()
    assert await nodes.supervisor.address("storage-0") == "at storage-0.0"
    nodes.processes[0].end(-9)
    await turns()
    assert nodes.lost == [("storage-0.0", "node storage-0 (pid 0) was killed by signal 9")]
    assert nodes.processes[0].killed, "what the node started must not outlive it"


@pytest.mark.parametrize(("status", "fix"), [(-9, "memory"), (1, "read storage-0's log")])
async def test_who_reads_of_a_lost_node_is_sent_where_its_cause_can_be_found(
    nodes: Nodes, status: int, fix: str
) -> None:
    nodes.register()
    await nodes.supervisor.address("storage-0")
    nodes.processes[0].end(status)
    await turns()
    assert fix in nodes.fixes[0]


async def test_a_storage_unit_that_is_silent_for_ten_seconds_is_lost_for_nobody_and_after_twenty_for_everybody(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger = LedgerService(connect=Peer, watched=True)  # type: ignore[arg-type]  # calls only
    lose: Any = lambda name, role, process, error: ledger.lose(f"at {process}")  # noqa: E731 - as a run does
    monkeypatch.setattr(nodes.supervisor, "_lost", lose)
    monkeypatch.setattr("headrace.services.supervisor.is_stopped", lambda pid: False)
    unit = Join("at storage-0.0", "process")
    number = ledger.join(unit)
    nodes.register()
    address = await nodes.supervisor.address("storage-0")

    async def silent(seconds: float) -> None:
        for _ in range(int(seconds / CHECK_SECONDS)):
            nodes.supervisor.check_silence()
            for _ in range(int(CHECK_SECONDS / WATCH_SECONDS)):
                ledger._look()
        await turns()

    await silent(10)
    assert ledger.units(None) == [address]
    assert ledger.join(unit) == number, "it goes on with what it has"
    nodes.supervisor.heartbeat(Heartbeat(node="storage-0.0", loop_lag=10.0))
    await silent(HEARTBEAT_DEADLINE)
    assert ledger.units(None) == [address]
    await silent(CHECK_SECONDS)
    assert nodes.processes[0].killed
    with pytest.raises(RunError, match="given up"):
        ledger.join(unit)
    await ledger.close()


async def test_a_node_that_is_killed_before_it_ever_served_is_started_again(nodes: Nodes) -> None:
    starting = asyncio.ensure_future(nodes.supervisor.started("storage-0"))
    await turns()
    nodes.processes[0].end(-9)
    await turns()
    nodes.register(1)
    assert await starting == "at storage-0.1"
    assert nodes.lost == []


async def test_a_node_that_ends_by_itself_before_it_ever_served_is_not_started_again(nodes: Nodes) -> None:
    starting = asyncio.ensure_future(nodes.supervisor.started("storage-0"))
    await turns()
    nodes.processes[0].end(1)
    with pytest.raises(RunError, match="ended with status 1 before it served"):
        await starting
    assert len(nodes.processes) == 1


async def test_a_node_that_ends_before_it_serves_is_not_lost_but_fails_who_waits(nodes: Nodes) -> None:
    waiting = asyncio.ensure_future(nodes.supervisor.address("storage-0"))
    await turns()
    nodes.processes[0].end(1)
    with pytest.raises(RunError, match="ended with status 1 before it served"):
        await waiting
    assert nodes.lost == []


async def test_a_node_that_ends_before_anybody_knew_where_it_served_fails_who_asks(nodes: Nodes) -> None:
    waiting = asyncio.ensure_future(nodes.supervisor.address("storage-0"))
    await turns()
    nodes.register()
    nodes.processes[0].end(1)
    with pytest.raises(RunError, match="ended with status 1"):
        await waiting
    assert nodes.lost == []


async def test_a_lost_node_is_started_again_as_another_process(nodes: Nodes) -> None:
    nodes.processes[0].end(1)
    restarting = asyncio.ensure_future(nodes.supervisor.restart("storage-0"))
    await turns()
    nodes.register(0)  # of the old process, on its way
    await turns()
    assert not restarting.done()
    nodes.register(1)
    assert await restarting == "at storage-0.1"
    assert [fields["pid"] for kind, fields in nodes.events if kind == "node_started"] == [0, 1]


async def test_a_node_that_dies_as_it_starts_is_started_again_until_it_was_started_too_often(nodes: Nodes) -> None:
    nodes.processes[0].end(1)
    restarting = asyncio.ensure_future(nodes.supervisor.restart("storage-0"))
    for start in (1, 2):
        await turns()
        nodes.processes[start].end(1)
    with pytest.raises(RunError, match="was lost 3 times") as stopped:
        await restarting
    assert "max_restarts" in stopped.value.fix


async def test_a_node_of_another_contract_is_refused_with_both_numbers(nodes: Nodes) -> None:
    nodes.register(contract=7)
    with pytest.raises(PluginError, match=f"storage-0 has contract version 7, its controller {CONTRACT_VERSION}"):
        await nodes.supervisor.address("storage-0")


def test_a_node_does_not_begin_for_a_controller_of_another_contract(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    network = Network.create(str(tmp_path), host=None)
    spec = NodeSpec(name="rollout-0", role="none", start=0, controller="", network=network, setup=b"", contract=7)
    path = tmp_path / "spec.json"
    path.write_bytes(msgspec.json.encode(spec))
    assert node.main(str(path)) == 1
    assert f"rollout-0 has contract version {CONTRACT_VERSION}, its controller 7" in caplog.text


async def test_ended_nodes_are_not_lost_nodes(tmp_path: Path) -> None:
    nodes = Nodes(tmp_path)
    await nodes.start()
    nodes.register()
    await nodes.supervisor.address("storage-0")
    await nodes.supervisor.close()
    assert nodes.lost == []
    assert nodes.events[-1] == ("node_stopped", {"node": "storage-0", "reason": "ended"})


async def test_a_node_that_is_stopped_is_no_lost_node_and_is_not_known_any_more(nodes: Nodes) -> None:
    nodes.register()
    await nodes.supervisor.address("storage-0")
    await nodes.supervisor.stop("storage-0")
    assert nodes.events[-1] == ("node_stopped", {"node": "storage-0", "reason": "ended"})
    assert nodes.lost == []
    await nodes.supervisor.stop("storage-0")


async def test_a_dismissed_node_that_dies_before_it_is_stopped_is_no_lost_node(nodes: Nodes) -> None:
    nodes.register()
    await nodes.supervisor.address("storage-0")
    nodes.supervisor.dismiss("storage-0")
    nodes.processes[0].end(-9)
    await turns()
    await nodes.supervisor.stop("storage-0")
    assert nodes.events[-1] == ("node_stopped", {"node": "storage-0", "reason": "ended"})
    assert nodes.lost == []


async def test_a_supervisor_that_cannot_say_what_happened_ends_the_run(nodes: Nodes) -> None:
    def full(kind: str, **fields: Any) -> None:
        raise RunError("cannot write events.jsonl")

    nodes.register()
    await nodes.supervisor.address("storage-0")
    nodes.emit = full  # type: ignore[method-assign]
    nodes.processes[0].end(1)
    await turns()
    assert [str(error) for error in nodes.failures] == ["cannot write events.jsonl"]


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def stop(process: subprocess.Popen[bytes]) -> None:
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)


@pytest.mark.skipif(sys.platform != "linux", reason="whether a process is stopped is told on Linux only")
async def test_a_stopped_node_is_killed_before_one_that_may_only_be_slow(
    nodes: Nodes, sleeper: subprocess.Popen[bytes]
) -> None:
    nodes.register()
    await nodes.supervisor.address("storage-0")
    nodes.processes[0]._pid = sleeper.pid
    for _ in range(10):
        nodes.supervisor.check_silence()
    assert not nodes.processes[0].killed
    stop(sleeper)
    nodes.supervisor.check_silence()
    await turns()
    assert "being stopped, and was killed" in nodes.lost[0][1]
    assert "stopped its process (SIGSTOP)" in nodes.fixes[0], "its log, which is empty, cannot say so"


async def test_while_the_controller_itself_is_stopped_no_node_is_silent(
    nodes: Nodes, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes.register()
    await nodes.supervisor.address("storage-0")
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 1000)  # the event loop's clock too: a check is due
    await turns()
    assert not nodes.processes[0].killed
