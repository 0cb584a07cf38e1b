"""A launcher of plain processes in sessions of their own."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import os
import signal
from asyncio.subprocess import DEVNULL, STDOUT, Process

from headrace.contract import Launcher, NodeLaunch, NodeProcess
from headrace.errors import PluginError
from headrace.process import die_with_parent
from headrace.testing.trouble import FakeSettings, Trouble


class FakeLauncher(Launcher):
    """A piece of work is a launch."""

    Settings = FakeSettings

    def __init__(self, settings: FakeSettings) -> None:
        super().__init__(settings)
        self._trouble = Trouble(settings, error=PluginError)

    async def launch(self, node: NodeLaunch) -> NodeProcess:
        await self._trouble.work_async(f"launching node {node.name}")
        with open(node.log_path, "ab") as log:  # noqa: ASYNC230  # a local file
            try:
                process = await asyncio.create_subprocess_exec(
                    node.python,
                    *node.arguments,
                    env=self._environment(node),
                    stdin=DEVNULL,
                    stdout=log,
                    stderr=self._stderr(),
                    start_new_session=True,
                    preexec_fn=self._in_child(),
                )
            except OSError as error:
                raise self._unstartable(node, error) from error
        return self._process(process)

    def _environment(self, node: NodeLaunch) -> dict[str, str]:
        return {**os.environ, **node.environment}

    def _stderr(self) -> int:
        return STDOUT

    def _in_child(self) -> functools.partial[None] | None:
        return functools.partial(die_with_parent, os.getpid())

    def _unstartable(self, node: NodeLaunch, error: OSError) -> Exception:
        return PluginError(f"node {node.name}: {node.python!r} cannot be started: {error}", fix="correct `python`")

    def _process(self, process: Process) -> NodeProcess:
        return FakeProcess(process)


class FakeProcess(NodeProcess):
    """The leader of its process group."""

    def __init__(self, process: Process) -> None:
        self.process = process

    @property
    def pid(self) -> int:
        return self.process.pid

    async def wait(self) -> int:
        return await self.process.wait()

    def terminate(self) -> None:
        self._signal(signal.SIGTERM)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)

    def _signal(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            with contextlib.suppress(ProcessLookupError):  # it ended a moment ago
                os.killpg(self.pid, number)
