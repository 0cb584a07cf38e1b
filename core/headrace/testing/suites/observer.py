"""The rules of the ``observer`` role.

class TestMyObserver(ObserverContract):
    @pytest.fixture
    def plugin(self) -> Observer:
        return MyObserver(MyObserver.Settings())
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pluggy
import pytest

from headrace.hooks import PROJECT, Observer, ObserverHooks
from headrace.testing.suites.plugin import PluginContract
from headrace.testing.suites.rules import check, override, rule
from headrace.testing.suites.watched import EVENTS, JOB, METRICS, RESUMED, SUMMARY


class ObserverContract(PluginContract):
    """Subclass it and override :meth:`plugin`."""

    @pytest.fixture
    def plugin(self) -> Observer:
        """An observer that has watched nothing yet."""
        override("plugin", "an observer")

    @rule(
        "Every method with `hookimpl` is a hook of ObserverHooks and takes its arguments alone; there is at least one."
    )
    def test_its_hooks_are_known(self, plugin: Observer) -> None:
        manager = _managed(plugin)
        manager.check_pending()
        check(manager.get_hookcallers(plugin), "it implements no hook, so it would never be called")

    @rule("An observer follows a run from its first event to its last without raising.")
    def test_it_follows_a_run_without_raising(self, plugin: Observer, tmp_path: Path) -> None:
        for hook, arguments in _run(str(tmp_path)):
            _tell(plugin, hook, arguments)
        plugin.close()

    @rule("An observer follows a run that is resumed, whose past it reads from `run_resumed`.")
    def test_it_follows_a_resumed_run(self, plugin: Observer, tmp_path: Path) -> None:
        for hook, arguments in _resumed_run(str(tmp_path)):
            _tell(plugin, hook, arguments)
        plugin.close()

    @rule("What an observer is given is its own to read and not to change.")
    def test_it_changes_nothing_it_is_given(self, plugin: Observer, tmp_path: Path) -> None:
        for hook, arguments in _run(str(tmp_path)):
            untouched = copy.deepcopy(arguments)
            _tell(plugin, hook, arguments)
            check(arguments == untouched, f"{hook} was given {untouched} and left {arguments}")
        plugin.close()

    @rule("`close` may follow any hook: a run that fails early, or an observer that was switched off.")
    def test_close_may_follow_any_hook(self, plugin: Observer, tmp_path: Path) -> None:
        for calls in (0, 1, 8):
            observer = type(plugin)(plugin.settings)
            for hook, arguments in list(_run(str(tmp_path)))[:calls]:
                _tell(observer, hook, arguments)
            observer.close()


def _run(run_dir: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """What the controller tells, hook by hook; copies, for an observer could change them."""
    yield "run_opened", {"run_dir": run_dir, "job": copy.deepcopy(JOB)}
    for event in (*EVENTS[:RESUMED], EVENTS[-1]):
        yield "event", {"event": copy.deepcopy(event)}
        if event["kind"] == "batch_trained":
            yield "metrics", {"record": dict(METRICS)}
    yield "notice", {"text": "stopping; once more to stop at once"}
    yield "run_closed", {"status": "completed", "summary": copy.deepcopy(SUMMARY)}


def _resumed_run(run_dir: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The same run, going on from its checkpoint."""
    yield "run_opened", {"run_dir": run_dir, "job": copy.deepcopy(JOB)}
    yield "run_resumed", {"past": lambda: iter(copy.deepcopy(EVENTS[:RESUMED]))}
    for event in EVENTS[RESUMED:]:
        yield "event", {"event": copy.deepcopy(event)}
    yield "run_closed", {"status": "stopped", "summary": {"reason": "interrupted", "run_dir": run_dir}}


def _managed(plugin: Observer) -> pluggy.PluginManager:
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(ObserverHooks)
    manager.register(plugin)
    return manager


def _tell(plugin: Observer, hook: str, arguments: dict[str, Any]) -> None:
    """As the run does; a hook that is not as it must be is another rule's matter."""
    try:
        manager = _managed(plugin)
    except pluggy.PluginValidationError:
        return
    getattr(manager.hook, hook)(**arguments)
