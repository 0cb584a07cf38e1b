"""Starts nodes as processes of this machine.

Invariant: a node ends with the launcher's process, however that ends. A normal end kills the node's process
group; for a kill -9 the kernel does it (``PR_SET_PDEATHSIG``), to the node itself: what a node starts must ask for
the same with :func:`headrace.process.die_with_parent`. A node that ends on its own takes its group with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process

from headrace.contract import Launcher, NodeLaunch, NodeProcess
from headrace.errors import PluginError, RunError
from headrace.process import die_with_parent


class LocalLauncher(Launcher):
    """``launch`` must be called from a thread that lives as long as the nodes: the kernel ties them to it."""

    async def launch(self, node: NodeLaunch) -> NodeProcess:
        """The node in a session of its own: a Ctrl-C in the terminal does not reach it."""
        try:
            log = open(node.log_path, "ab")  # noqa: ASYNC230, SIM115  # a local file, closed below
        except OSError as error:
            raise RunError(f"node {node.name} cannot log to {node.log_path}: {error.strerror}") from error
        with log:
            try:
                process = await asyncio.create_subprocess_exec(
                    node.python,
                    *node.arguments,
                    env={**os.environ, **node.environment},
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=STDOUT,
                    start_new_session=True,
                    # The only place without a gap: a node that asked for itself would live on when the launcher dies
                    # while it still imports. It is one C call, looked up before the fork.
                    preexec_fn=functools.partial(die_with_parent, os.getpid()),
                )
            except OSError as error:
                raise PluginError(
                    f"node {node.name}: the interpreter {node.python!r} cannot be started: {error.strerror}",
                    fix="set the node's `python` to an interpreter that has headrace and the node's plugin installed",
                ) from error
        return LocalProcess(process)


class LocalProcess(NodeProcess):
    """The leader of its process group."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._cleared = asyncio.get_running_loop().create_task(self._clear())

    @property
    def pid(self) -> int:
        return self._process.pid

    async def wait(self) -> int:
        return await asyncio.shield(self._cleared)

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    async def _clear(self) -> int:
        """Wait for the node, then end what it left behind."""
        status = await self._process.wait()
        _signal_group(self.pid, signal.SIGKILL)
        return status

    def _signal(self, number: signal.Signals) -> None:
        if not self._cleared.done():
            _signal_group(self.pid, number)


def _signal_group(group: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):  # everybody in it has ended
        os.killpg(group, number)
