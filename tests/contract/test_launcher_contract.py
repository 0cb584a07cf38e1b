"""Every launcher keeps the rules of its role."""

from __future__ import annotations

import pytest

from headrace.contract import Launcher, NoSettings
from headrace.testing import FakeLauncher
from headrace.testing.suites import LauncherContract
from headrace_launchers.local import LocalLauncher


class TestLocalLauncher(LauncherContract):
    @pytest.fixture
    def plugin(self) -> Launcher:
        return LocalLauncher(NoSettings())


class TestFakeLauncher(LauncherContract):
    @pytest.fixture
    def plugin(self) -> Launcher:
        return FakeLauncher(FakeLauncher.Settings())
