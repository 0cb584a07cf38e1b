"""Every staleness policy keeps the rules of its role."""

from __future__ import annotations

import pytest

from headrace.contract import StalenessPolicy
from headrace.testing import FakeStaleness
from headrace.testing.suites import StalenessContract
from headrace_staleness.delayed_update import DelayedUpdate
from headrace_staleness.multi_version import MultiVersion
from headrace_staleness.partial_rollout import PartialRollout
from headrace_staleness.synchronous import Synchronous
from headrace_staleness.windowed import Windowed


class TestSynchronous(StalenessContract):
    @pytest.fixture
    def plugin(self) -> StalenessPolicy:
        return Synchronous(Synchronous.Settings())


class TestMultiVersion(StalenessContract):
    @pytest.fixture(params=[(0, None), (1, None), (2, None), (2, 1.0), (4, 4.0)])
    def plugin(self, request: pytest.FixtureRequest) -> StalenessPolicy:
        bound, outstanding = request.param
        return MultiVersion(MultiVersion.Settings(max_staleness=bound, outstanding_batches=outstanding))


class TestPartialRollout(StalenessContract):
    @pytest.fixture(params=[(0, None), (1, None), (2, None), (2, 1.0), (4, 4.0)])
    def plugin(self, request: pytest.FixtureRequest) -> StalenessPolicy:
        bound, outstanding = request.param
        return PartialRollout(PartialRollout.Settings(max_staleness=bound, outstanding_batches=outstanding))


class TestWindowed(StalenessContract):
    @pytest.fixture(params=[0, 1, 2, 4])
    def plugin(self, request: pytest.FixtureRequest) -> StalenessPolicy:
        return Windowed(Windowed.Settings(max_staleness=request.param))


class TestDelayedUpdate(StalenessContract):
    @pytest.fixture
    def plugin(self) -> StalenessPolicy:
        return DelayedUpdate(DelayedUpdate.Settings())


class TestFakeStaleness(StalenessContract):
    @pytest.fixture(params=[(0, False), (1, False), (1, True)])
    def plugin(self, request: pytest.FixtureRequest) -> StalenessPolicy:
        bound, interrupts = request.param
        return FakeStaleness(FakeStaleness.Settings(max_staleness=bound, interrupts=interrupts))
