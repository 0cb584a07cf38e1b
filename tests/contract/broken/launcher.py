"""Launchers that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

import functools
import os
import signal
from asyncio.subprocess import DEVNULL, Process

import pytest

from headrace.contract import Launcher, NodeLaunch, NodeProcess
from headrace.testing import FakeLauncher
from headrace.testing.launcher import FakeProcess
from headrace.testing.suites import LauncherContract


class Broken(LauncherContract):
    """Subclasses say which launcher, or which process it starts."""

    Kind: type[FakeLauncher] = FakeLauncher
    Handle: type[FakeProcess] = FakeProcess

    @pytest.fixture
    def plugin(self) -> Launcher:
        handle = self.Handle

        class Starting(self.Kind):  # type: ignore[misc,name-defined]  # a class that a subclass names
            def _process(self, process: Process) -> NodeProcess:
                return handle(process)

        return Starting(FakeLauncher.Settings())


class TestIgnoresTheEnvironment(Broken):
    breaks = "test_a_node_has_its_interpreter_arguments_and_environment"

    class Kind(FakeLauncher):
        def _environment(self, node: NodeLaunch) -> dict[str, str]:
            return dict(os.environ)


class TestHidesErrors(Broken):
    breaks = "test_output_and_errors_go_to_the_log"

    class Kind(FakeLauncher):
        def _stderr(self) -> int:
            return DEVNULL


class TestKnowsOnlyOneFailure(Broken):
    breaks = "test_wait_gives_the_exit_status"

    class Handle(FakeProcess):
        async def wait(self) -> int:
            return min(await super().wait(), 1)


class TestGivesShellStatus(Broken):
    breaks = "test_the_status_after_a_signal_is_negative"

    class Handle(FakeProcess):
        async def wait(self) -> int:
            status = await super().wait()
            return status if status >= 0 else 128 - status


class Lone(FakeProcess):
    """Signals reach the node alone."""

    def alone(self, number: signal.Signals) -> None:
        if self.process.returncode is None:
            os.kill(self.pid, number)


class TestKillsTheNodeAlone(Broken):
    breaks = "test_kill_ends_the_node_and_its_children"

    class Handle(Lone):
        def kill(self) -> None:
            self.alone(signal.SIGKILL)


class TestTerminatesTheNodeAlone(Broken):
    breaks = "test_terminate_reaches_the_node_and_its_children"

    class Handle(Lone):
        def terminate(self) -> None:
            self.alone(signal.SIGTERM)


class TestMindsTheEnded(Broken):
    breaks = "test_ending_a_node_that_has_ended_is_no_error"

    class Handle(FakeProcess):
        def _signal(self, number: signal.Signals) -> None:
            os.killpg(self.pid, number)


class TestLetsErrorsThrough(Broken):
    breaks = "test_an_interpreter_that_cannot_be_started_is_a_plugin_error"

    class Kind(FakeLauncher):
        def _unstartable(self, node: NodeLaunch, error: OSError) -> Exception:
            return error


class TestLeavesOrphans(Broken):
    breaks = "test_a_node_dies_with_the_launcher_s_process"

    class Kind(FakeLauncher):
        def _in_child(self) -> functools.partial[None] | None:
            return None
