"""Every observer keeps the rules of its role, and the run that the suite tells of is one that could be."""

from __future__ import annotations

import inspect

import pytest

from headrace.hooks import Observer, ObserverHooks
from headrace.observe.events import FIELDS
from headrace.testing import FakeObserver
from headrace.testing.suites import ObserverContract
from headrace.testing.suites.observer import _resumed_run, _run
from headrace.testing.suites.watched import EVENTS
from headrace_observers.console import Console


class TestConsole(ObserverContract):
    @pytest.fixture
    def plugin(self) -> Observer:
        return Console(Console.Settings())


class TestFakeObserver(ObserverContract):
    @pytest.fixture
    def plugin(self) -> Observer:
        return FakeObserver(FakeObserver.Settings())


def test_the_suite_tells_of_every_kind_of_event_with_its_fields() -> None:
    told = {event["kind"]: frozenset(event) - {"seq", "time", "epoch", "kind"} for event in EVENTS}
    assert told == dict(FIELDS)


def test_a_suite_s_run_calls_every_hook() -> None:
    hooks = {name for name, _ in inspect.getmembers(ObserverHooks, inspect.isfunction)}
    assert {hook for run in (_run, _resumed_run) for hook, _ in run("runs/watched")} == hooks
