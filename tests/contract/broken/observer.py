"""Observers that break one rule each; ``breaks`` names the rule's test."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.contract import NoSettings
from headrace.hooks import Observer, hookimpl
from headrace.testing import FakeObserver
from headrace.testing.suites import ObserverContract


class Broken(ObserverContract):
    """Subclasses say which observer."""

    Kind: type[FakeObserver]

    @pytest.fixture
    def plugin(self) -> Observer:
        return self.Kind(NoSettings())


class TestListensToNobody(Broken):
    breaks = "test_its_hooks_are_known"

    class Kind(FakeObserver):
        @hookimpl
        def run_ended(self, status: str) -> None:
            raise NotImplementedError


class TestStumblesOverNothing(Broken):
    breaks = "test_it_follows_a_run_without_raising"

    class Kind(FakeObserver):
        complained = False

        @hookimpl
        def run_closed(self, status: str, summary: Any) -> None:
            if not type(self).complained:
                type(self).complained = True
                raise TypeError("cannot format None")


class TestHasNoPast(Broken):
    breaks = "test_it_follows_a_resumed_run"

    class Kind(FakeObserver):
        @hookimpl
        def run_resumed(self, past: Any) -> None:
            raise ValueError("the first event must be run_started")


class TestTidiesUp(Broken):
    breaks = "test_it_changes_nothing_it_is_given"

    class Kind(FakeObserver):
        @hookimpl
        def event(self, event: Any) -> None:
            event.pop("epoch")


class TestClosesWhatItNeverOpened(Broken):
    breaks = "test_close_may_follow_any_hook"

    class Kind(FakeObserver):
        def close(self) -> None:
            if not self.told:
                raise ValueError("nothing was opened")
