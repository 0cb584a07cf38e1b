"""Staleness policies that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest

from headrace.contract import FlowView, Interruption, StalenessPolicy
from headrace.errors import StalenessError
from headrace.testing import FakeStaleness
from headrace.testing.suites import StalenessContract


class Broken(StalenessContract):
    """Subclasses say which policy."""

    Kind: type[FakeStaleness]
    bound: ClassVar[int] = 1

    @pytest.fixture
    def plugin(self) -> StalenessPolicy:
        return self.Kind(FakeStaleness.Settings(max_staleness=self.bound))


class TestRefusesLargeBatches(Broken):
    breaks = "test_check_accepts_settings_that_work"

    class Kind(FakeStaleness):
        def check(self, *, batch_groups: int) -> None:
            if batch_groups > 100:
                raise StalenessError("too large a batch")


class TestNeverWaits(Broken):
    breaks = "test_no_trained_row_is_too_stale"

    class Kind(FakeStaleness):
        def admit(self, view: FlowView) -> int:
            return 3 * view.batch_groups - view.outstanding

        def may_take(self, view: FlowView, chosen: Mapping[int, int]) -> bool:
            return True

        def may_publish(self, view: FlowView) -> bool:
            return True


class TestAdmitsTooFew(Broken):
    breaks = "test_a_run_never_comes_to_a_halt"

    class Kind(FakeStaleness):
        def admit(self, view: FlowView) -> int:
            return super().admit(view) - 1


class TestChangesItsMind(Broken):
    breaks = "test_the_same_view_gets_the_same_answer"

    class Kind(FakeStaleness):
        calls = 0

        def admit(self, view: FlowView) -> int:
            self.calls += 1
            groups = super().admit(view)
            return groups + self.calls % 2 if groups else 0


class TestSaysItIsReproducible(Broken):
    breaks = "test_a_policy_that_interrupts_is_not_lockstep"

    class Kind(FakeStaleness):
        lockstep = True
        interruption = Interruption()


class TestIsNotReproducible(Broken):
    breaks = "test_a_bound_of_0_is_lockstep"
    bound = 0

    class Kind(FakeStaleness):
        @property
        def lockstep(self) -> bool:
            return False
