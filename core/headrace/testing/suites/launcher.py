"""The rules of the ``launcher`` role. They start processes, on Linux.

class TestMyLauncher(LauncherContract):
    @pytest.fixture
    def plugin(self) -> Launcher:
        return MyLauncher(MyLauncher.Settings())
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
import time
import warnings
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.contract import Launcher, NodeLaunch, NodeProcess
from headrace.errors import PluginError
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, raises_async, rule

SLEEP = "import os, time; print(os.getpid(), flush=True); time.sleep(600)"
PARENT = (
    "import os, time; child = os.posix_spawn('/bin/sleep', ['sleep', '600'], os.environ);"
    "print(os.getpid(), child, flush=True); time.sleep(600)"
)
PATIENCE = 20.0
"""Seconds in which a process starts, on a busy machine."""


class LauncherContract(PluginContract):
    """Subclass it and override :meth:`plugin`. ``deadline``: seconds in which a process that is ended is gone."""

    deadline: ClassVar[float] = 5.0

    @pytest.fixture
    def plugin(self) -> Launcher:
        """A launcher that starts processes on this machine."""
        override("plugin", "a launcher")

    @rule("A node runs under its interpreter with its arguments; its environment is added to the launcher's own.")
    async def test_a_node_has_its_interpreter_arguments_and_environment(
        self, plugin: Launcher, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("OF_THE_LAUNCHER", "kept")
        code = "import os, sys; print(sys.executable, os.environ.get('OF_THE_LAUNCHER'), os.environ.get('OF_THE_NODE'))"
        node = await plugin.launch(_node(tmp_path, code, OF_THE_NODE="added"))
        await node.wait()
        found, expected = _log(tmp_path).split(), [sys.executable, "kept", "added"]
        check(found == expected, f"interpreter and variables are {found}, expected {expected}")

    @rule("Standard output and standard error go to the node's log.")
    async def test_output_and_errors_go_to_the_log(self, plugin: Launcher, tmp_path: Path) -> None:
        node = await plugin.launch(
            _node(tmp_path, "import os; os.write(1, b'out' + bytes([10])); os.write(2, b'err' + bytes([10]))")
        )
        await node.wait()
        check(_log(tmp_path).split() == ["out", "err"], f"the log holds {_log(tmp_path)!r}")

    @rule("`wait` gives the exit status, however often it is asked.")
    async def test_wait_gives_the_exit_status(self, plugin: Launcher, tmp_path: Path) -> None:
        node = await plugin.launch(_node(tmp_path, "raise SystemExit(7)"))
        found = [await node.wait(), *await asyncio.gather(node.wait(), node.wait())]
        check(found == [7, 7, 7], f"a node that exits with 7 gave {found}")

    @rule("The exit status of a node that a signal ended is negative.")
    async def test_the_status_after_a_signal_is_negative(self, plugin: Launcher, tmp_path: Path) -> None:
        async with _running(plugin, tmp_path, SLEEP) as (node, pids):
            os.kill(pids[0], signal.SIGKILL)
            status = await node.wait()
        check(status == -signal.SIGKILL, f"a node that SIGKILL ended gave {status}")

    @rule("`kill` ends the node and all it started, at once.")
    async def test_kill_ends_the_node_and_its_children(self, plugin: Launcher, tmp_path: Path) -> None:
        async with _running(plugin, tmp_path, PARENT) as (node, pids):
            node.kill()
            await node.wait()
            await _all_end(pids, self.deadline)

    @rule("`terminate` asks the node, and all it started, to end.")
    async def test_terminate_reaches_the_node_and_its_children(self, plugin: Launcher, tmp_path: Path) -> None:
        async with _running(plugin, tmp_path, PARENT) as (node, pids):
            node.terminate()
            await node.wait()
            await _all_end(pids, self.deadline)

    @rule("`terminate` and `kill` of a node that has ended are no error.")
    async def test_ending_a_node_that_has_ended_is_no_error(self, plugin: Launcher, tmp_path: Path) -> None:
        node = await plugin.launch(_node(tmp_path, "pass"))
        await node.wait()
        node.terminate()
        node.kill()

    @rule("An interpreter that cannot be started is a PluginError.")
    async def test_an_interpreter_that_cannot_be_started_is_a_plugin_error(
        self, plugin: Launcher, tmp_path: Path
    ) -> None:
        await raises_async(PluginError, plugin.launch(_node(tmp_path, "pass", python="/nowhere/python")))

    @rule("A node dies with the launcher's process, however that ends.")
    def test_a_node_dies_with_the_launcher_s_process(self, plugin: Launcher, tmp_path: Path) -> None:
        with warnings.catch_warnings():
            # A fork of a process with threads is warned of, since locks may be held; the child takes none of them.
            warnings.simplefilter("ignore", DeprecationWarning)
            launcher = os.fork()
        if launcher == 0:
            _launch_and_die(plugin, tmp_path)
        os.waitpid(launcher, 0)
        (pid,) = _pids(tmp_path) or (0,)
        check(pid, "the node was not started in a process that forked")
        end = time.monotonic() + self.deadline
        while _alive(pid) and time.monotonic() < end:
            os.sched_yield()
        survived = _alive(pid)
        _kill([pid])
        check(not survived, "SIGKILL ended the launcher's process, and the node lives on")


def _node(folder: Path, code: str, *, python: str = sys.executable, **environment: str) -> NodeLaunch:
    return NodeLaunch(
        name="node",
        python=python,
        arguments=("-I", "-S", "-c", code),
        environment=environment,
        log_path=str(folder / "node.log"),
    )


def _log(folder: Path) -> str:
    path = folder / "node.log"
    return path.read_text() if path.exists() else ""


def _pids(folder: Path) -> list[int]:
    """What the node printed; empty before its line is whole."""
    text = _log(folder)
    return [int(word) for word in text.split()] if text.endswith("\n") else []


@asynccontextmanager
async def _running(plugin: Launcher, folder: Path, code: str) -> AsyncIterator[tuple[NodeProcess, list[int]]]:
    """A node that has printed its pid, and those of its children; none of them outlives the rule."""
    node = await plugin.launch(_node(folder, code))
    await _soon(lambda: bool(_pids(folder)), "the node never printed its pid")
    pids = _pids(folder)
    try:
        yield node, pids
    finally:
        _kill(pids)
        await node.wait()


async def _soon(condition: Callable[[], bool], otherwise: str, *, seconds: float = PATIENCE) -> None:
    end = time.monotonic() + seconds
    while not condition():
        check(time.monotonic() < end, otherwise)
        await asyncio.sleep(0.002)


async def _all_end(pids: list[int], seconds: float) -> None:
    await _soon(lambda: not any(map(_alive, pids)), "the node or a process that it started lives on", seconds=seconds)


def _alive(pid: int) -> bool:
    """Whether a process runs (a zombie does not)."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"


def _kill(pids: list[int]) -> None:
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):  # it has ended, as it should
            os.kill(pid, signal.SIGKILL)


def _launch_and_die(plugin: Launcher, folder: Path) -> None:
    """In a forked process: start a node, and end without a chance to tidy up. Never returns."""

    async def launch() -> None:
        await plugin.launch(_node(folder, SLEEP))
        await _soon(lambda: bool(_pids(folder)), "the node never printed its pid")
        os.kill(os.getpid(), signal.SIGKILL)

    try:
        asyncio.run(launch())
    finally:
        os._exit(1)
