"""Starts nodes, hears their heartbeats, knows when one is gone, and starts it again when it is told to.

A node that sends no heartbeat is taken for hung and killed: it is then lost like one that died. Its silence is counted
in checks, not by a clock: while this process itself was stopped it could hear nobody. Nobody else in a run takes a node
for lost. Invariant: when :meth:`Supervisor.close` returns, no process it started is alive.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.contract import CONTRACT_VERSION, Launcher, NodeLaunch, NodeProcess
from headrace.errors import DeadlineError, PluginError, RunError
from headrace.process import is_stopped
from headrace.services.handshake import require_contract
from headrace.services.messages import Message
from headrace.services.node_messages import Heartbeat, NodeSpec, Registration, node_id
from headrace.wire import Network, write_private

START_DEADLINE = 120.0
"""Seconds a node may take to serve; importing an engine can be slow."""
CHECK_SECONDS = 1.0
"""Between two checks whether nodes are silent."""
HEARTBEAT_DEADLINE = 20.0
STOPPED_DEADLINE = 5.0
"""Seconds of silence of a node whose process is stopped (SIGSTOP): it is not merely slow."""
STOP_SECONDS = 3.0
"""What nodes have to end by themselves: a run whose trainer was killed is over within 10 s, report included."""
LOG_TAIL_LINES = 15
WHO_KILLED = "a person killed it, or the kernel for want of memory: then `dmesg` says so, and smaller batches help"
STOPPED = "being stopped"
WHO_STOPPED = "a person, a debugger or a batch system stopped its process (SIGSTOP); its log knows nothing of that"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodePlan:
    """How a node is started, the first time and again."""

    name: str
    role: str
    setup: Callable[[], Message]
    """Asked at every start: an address in it may be another one by then."""
    python: str
    threads: int


@dataclass(slots=True, eq=False)
class _Node:
    """One process of a node."""

    plan: NodePlan
    start: int
    process: NodeProcess
    log_path: Path
    registered: asyncio.Future[str]
    silence: float = 0.0
    """Seconds of checks since it was heard of."""
    silent: str = ""
    """Why it was killed, if it was."""
    in_use: bool = False
    """Whether somebody knows where it serves."""
    ended: str = ""
    """Why it is gone, once it is."""
    killed: bool = False
    """Whether it ended by a signal."""
    dismissed: bool = False
    """Whether it is to end by itself."""
    watch: asyncio.Task[None] | None = None
    """Ends when the process has."""

    @property
    def id(self) -> str:
        return node_id(self.plan.name, self.start)

    def lost(self, reason: str) -> RunError:
        name = self.plan.name
        return RunError(
            f"node {name} (pid {self.process.pid}) {reason}",
            origin=f"{self.log_path}\n{_tail(self.log_path)}",
            fix=_fix(name, reason),
        )


class Supervisor:
    """One per run. ``lost(name, role, id, error)`` is called for a node that :meth:`address` told of and that is gone;
    ``fail`` when the supervisor itself cannot go on."""

    def __init__(
        self,
        launcher: Launcher,
        *,
        network: Network,
        logs: Path,
        controller: str,
        max_restarts: int,
        emit: Callable[..., Any],
        lost: Callable[[str, str, str, RunError], None],
        fail: Callable[[BaseException], None],
    ) -> None:
        self._launcher = launcher
        self._network = network
        self._logs = logs
        self._controller = controller
        self._max_restarts = max_restarts
        self._emit = emit
        self._lost = lost
        self._fail = fail
        self._nodes: dict[str, _Node] = {}
        self._watches: set[asyncio.Task[None]] = set()
        self._closing = False
        self._silence = asyncio.create_task(self._watch_silence(), name="heartbeats")

    async def launch(self, plan: NodePlan) -> None:
        """Start a node's process; :meth:`address` waits for it."""
        await self._start(plan, 0)

    async def started(self, name: str) -> str:
        """:meth:`address` of a node that was launched. One that was killed before it served is started again; one that
        ended by itself would do so again."""
        try:
            return await self.address(name)
        except RunError:
            if not self._nodes[name].killed:
                raise
        return await self.restart(name)

    async def restart(self, name: str) -> str:
        """Start a lost node again, and again when it does not get as far as to serve; where it serves then. RunError
        when it has been started too often."""
        while True:
            node = self._nodes[name]
            if node.start >= self._max_restarts:
                error = node.lost(f"was lost {node.start + 1} times")
                error.fix += "; [launcher] max_restarts says how often a node is started again"
                raise error
            await self._start(node.plan, node.start + 1)
            try:
                return await self.address(name)
            except DeadlineError:
                raise
            except RunError:  # it ended before it served: counted, and tried again
                continue

    async def _start(self, plan: NodePlan, start: int) -> None:
        log_path = self._logs / f"{plan.name}.log"
        spec = NodeSpec(
            name=plan.name,
            role=plan.role,
            start=start,
            controller=self._controller,
            network=self._network,
            setup=msgspec.msgpack.encode(plan.setup()),
            log=str(log_path),
        )
        path = Path(self._network.directory) / f"{spec.id}.json"
        write_private(path, msgspec.json.encode(spec))
        process = await self._launcher.launch(
            NodeLaunch(
                name=plan.name,
                python=plan.python,
                arguments=("-m", "headrace.services.node", str(path)),
                environment=_environment(plan.threads),
                log_path=str(log_path),
            )
        )
        node = _Node(plan, start, process, log_path, asyncio.get_running_loop().create_future())
        self._nodes[plan.name] = node
        watch = node.watch = asyncio.create_task(self._watch(node), name=f"watch {node.id}")
        watch.add_done_callback(self._watched)
        self._watches.add(watch)
        self._emit("node_started", node=plan.name, role=plan.role, pid=process.pid)

    async def address(self, name: str) -> str:
        """Where the node serves, once it does. RunError when it ends before, DeadlineError when it takes too long,
        PluginError when it is of another contract."""
        node = self._nodes[name]
        await asyncio.wait({node.registered}, timeout=START_DEADLINE)
        if not node.registered.done():
            raise DeadlineError(
                f"node {name} did not serve within {START_DEADLINE:.0f} s of its start",
                origin=f"{node.log_path}\n{_tail(node.log_path)}",
                fix="read the node's log; a slow disk or a very large model needs a longer start",
            )
        address = node.registered.result()
        if node.ended:
            raise node.lost(node.ended)
        node.in_use = True
        return address

    def register(self, registration: Registration) -> None:
        """A node serves; but one of another contract, which fails who waits for it."""
        node = self._by_id(registration.node)
        if node is None or node.registered.done():
            return
        try:
            require_contract(node.plan.name, of_node=registration.contract, of_controller=CONTRACT_VERSION)
            node.registered.set_result(registration.address)
        except PluginError as error:
            node.registered.set_exception(error)

    def heartbeat(self, beat: Heartbeat) -> None:
        """A node lives."""
        if (node := self._by_id(beat.node)) is not None:
            node.silence = 0.0

    def _by_id(self, process: str) -> _Node | None:
        """None for a process that has been replaced."""
        node = self._nodes.get(process.rpartition(".")[0])
        return node if node is not None and node.id == process else None

    def dismiss(self, name: str) -> None:
        """A node is not needed any more: from now on its end is no loss."""
        self._nodes[name].dismissed = True

    async def stop(self, name: str) -> None:
        """End a node that is not needed any more: ask, wait a little, then kill. Nothing happens when there is none."""
        if (node := self._nodes.get(name)) is None:
            return
        assert node.watch is not None
        node.dismissed = True
        node.process.terminate()
        _, late = await asyncio.wait({node.watch}, timeout=STOP_SECONDS)
        if late:
            node.process.kill()
            await asyncio.wait(late)
        del self._nodes[name]

    async def close(self) -> None:
        """End every node: ask, wait a little, then kill."""
        self._closing = True
        self._silence.cancel()
        for node in self._nodes.values():
            node.process.terminate()
        if self._watches:
            _, late = await asyncio.wait(self._watches, timeout=STOP_SECONDS)
            if late:
                for node in self._nodes.values():
                    node.process.kill()
                await asyncio.wait(late)

    async def _watch(self, node: _Node) -> None:
        status = await node.process.wait()
        node.process.kill()  # what the node itself started must not outlive it
        expected = self._closing or node.dismissed
        node.killed = status < 0 and not expected
        node.ended = reason = "ended" if expected else node.silent or _cause(status)
        self._emit("node_stopped", node=node.plan.name, reason=reason)
        if not node.registered.done():
            node.registered.set_exception(node.lost(f"{reason} before it served"))
            node.registered.exception()  # nobody may be waiting for it
        elif node.in_use and not expected:
            self._lost(node.plan.name, node.plan.role, node.id, node.lost(reason))

    def _watched(self, watch: asyncio.Task[None]) -> None:
        self._watches.discard(watch)
        if not watch.cancelled() and (error := watch.exception()) is not None:
            self._fail(error)

    async def _watch_silence(self) -> None:
        while True:
            await asyncio.sleep(CHECK_SECONDS)
            self.check_silence()

    def check_silence(self) -> None:
        """Kill the nodes that served and have not been heard of for too many checks. One that is still starting has
        :data:`START_DEADLINE`, and is not asked for heartbeats."""
        for node in self._nodes.values():
            if not node.registered.done() or node.silent:
                continue
            node.silence += CHECK_SECONDS
            stopped = node.silence > STOPPED_DEADLINE and is_stopped(node.process.pid)
            if stopped or node.silence > HEARTBEAT_DEADLINE:
                node.silent = f"sent no heartbeat for {node.silence:.0f} s{f', {STOPPED},' * stopped} and was killed"
                node.process.kill()


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


def _fix(name: str, reason: str) -> str:
    """What to do about a loss. The node's log knows nothing of a signal from outside."""
    if reason == _cause(-signal.SIGKILL):
        return WHO_KILLED
    return WHO_STOPPED if STOPPED in reason else f"read {name}'s log above"


def _tail(path: Path) -> str:
    """The last lines of a node's log, indented."""
    if not path.exists():
        return "    (no log)"
    lines = path.read_text(errors="replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join(f"    | {line}" for line in lines) or "    (the log is empty)"
