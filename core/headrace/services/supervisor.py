"""Starts nodes, hears their heartbeats, and knows when one is gone.

Invariant: when :meth:`Supervisor.close` returns, no process it started is alive.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.contract import Launcher, NodeLaunch, NodeProcess
from headrace.errors import DeadlineError, RunError
from headrace.services.messages import Heartbeat, Message, NodeSpec, Registration
from headrace.wire import Network

START_DEADLINE = 120.0
"""Seconds a node may take to serve; importing an engine can be slow."""
HEARTBEAT_DEADLINE = 20.0
STOP_SECONDS = 5.0
LOG_TAIL_LINES = 15


@dataclass(slots=True)
class _Node:
    process: NodeProcess
    role: str
    log_path: Path
    registered: asyncio.Future[str]
    heard: float = 0.0
    watch: asyncio.Task[None] | None = field(default=None)


class Supervisor:
    """One per run. ``failed`` completes, with the error, when a node is lost."""

    def __init__(
        self, launcher: Launcher, *, network: Network, logs: Path, controller: str, emit: Callable[..., Any]
    ) -> None:
        self.failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._launcher = launcher
        self._network = network
        self._logs = logs
        self._controller = controller
        self._emit = emit
        self._nodes: dict[str, _Node] = {}
        self._closing = False
        self._silence = asyncio.create_task(self._watch_silence(), name="heartbeats")

    async def launch(self, name: str, role: str, setup: Message, *, python: str, threads: int) -> None:
        """Start a node's process; :meth:`address` waits for it."""
        spec = NodeSpec(
            name=name,
            role=role,
            controller=self._controller,
            network=self._network,
            setup=msgspec.msgpack.encode(setup),
        )
        path = Path(self._network.directory) / f"{name}.json"
        _write_private(path, msgspec.json.encode(spec))
        log_path = self._logs / f"{name}.log"
        process = await self._launcher.launch(
            NodeLaunch(
                name=name,
                python=python,
                arguments=("-m", "headrace.services.node", str(path)),
                environment=_environment(threads),
                log_path=str(log_path),
            )
        )
        node = _Node(process, role, log_path, asyncio.get_running_loop().create_future())
        self._nodes[name] = node
        node.watch = asyncio.create_task(self._watch(name, node), name=f"watch {name}")
        self._emit("node_started", node=name, role=role, pid=process.pid)

    async def address(self, name: str) -> str:
        """Where the node serves, once it does."""
        node = self._nodes[name]
        ends: set[asyncio.Future[Any]] = {node.registered, self.failed}
        await asyncio.wait(ends, timeout=START_DEADLINE, return_when=asyncio.FIRST_COMPLETED)
        if self.failed.done():
            self.failed.result()
        if not node.registered.done():
            raise DeadlineError(
                f"node {name} did not serve within {START_DEADLINE:.0f} s of its start",
                origin=f"{node.log_path}\n{_tail(node.log_path)}",
                fix="read the node's log; a slow disk or a very large model needs a longer start",
            )
        return node.registered.result()

    def register(self, registration: Registration) -> None:
        """A node serves."""
        node = self._nodes[registration.name]
        node.heard = time.monotonic()
        if not node.registered.done():
            node.registered.set_result(registration.address)

    def heartbeat(self, beat: Heartbeat) -> None:
        """A node lives."""
        self._nodes[beat.name].heard = time.monotonic()

    async def close(self) -> None:
        """End every node: ask, wait a little, then kill."""
        self._closing = True
        self._silence.cancel()
        watches = [n.watch for n in self._nodes.values() if n.watch]
        for node in self._nodes.values():
            node.process.terminate()
        if watches:
            _, late = await asyncio.wait(watches, timeout=STOP_SECONDS)
            if late:
                for node in self._nodes.values():
                    node.process.kill()
                await asyncio.wait(late)
        if self.failed.done():
            self.failed.exception()

    async def _watch(self, name: str, node: _Node) -> None:
        status = await node.process.wait()
        node.process.kill()  # what the node itself started must not outlive it
        reason = "ended" if self._closing else _cause(status)
        self._emit("node_stopped", node=name, reason=reason)
        if not self._closing:
            self._fail(name, node, f"node {name} (pid {node.process.pid}) {reason}")

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(1.0)
            for name, node in self._nodes.items():
                silent = time.monotonic() - node.heard
                if node.registered.done() and silent > HEARTBEAT_DEADLINE:
                    self._fail(name, node, f"node {name} has sent no heartbeat for {silent:.0f} s")

    def _fail(self, name: str, node: _Node, message: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(
                RunError(message, origin=f"{node.log_path}\n{_tail(node.log_path)}", fix=f"read {name}'s log above")
            )


def _write_private(path: Path, data: bytes) -> None:
    """No other user may read the file, from its first moment on."""
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(data)


def _environment(threads: int) -> dict[str, str]:
    """What every node's process gets. glibc returns large blocks to the system at once and pays page faults to get
    them back, for every activation of every layer: keeping them makes training on a CPU faster."""
    return {
        "OMP_NUM_THREADS": str(threads),
        "MKL_NUM_THREADS": str(threads),
        "OPENBLAS_NUM_THREADS": str(threads),
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONUNBUFFERED": "1",
        "MALLOC_MMAP_THRESHOLD_": str(64 << 20),
        "MALLOC_TRIM_THRESHOLD_": str(256 << 20),
    }


def _cause(status: int) -> str:
    return f"was killed by signal {-status}" if status < 0 else f"ended with status {status}"


def _tail(path: Path) -> str:
    """The last lines of a node's log, indented."""
    if not path.exists():
        return "    (no log)"
    lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"    | {line}" for line in lines)
