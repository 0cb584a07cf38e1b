"""What the supervisor writes for a node is for that node alone."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.contract import Launcher, NodeLaunch, NodeProcess, NoSettings
from headrace.services.messages import NodeSpec, VersionCall
from headrace.services.supervisor import NodePlan, Supervisor
from headrace.wire import Network


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
    assert network.keys is not None
    for secret in (network.keys.server_secret, network.keys.client_secret):
        assert not any(secret in text for text in (repr(launch), repr(events), repr(spec)))
