"""Hooks reach every observer; an observer that raises costs nobody but itself."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from headrace.contract import NoSettings
from headrace.errors import ContractError
from headrace.hooks import Observer, hookimpl
from headrace.observe.observers import ObserverManager

EVENT = {"seq": 0, "time": 1.0, "epoch": 0, "kind": "version_retired", "version": 3}


class Recorder(Observer):
    """Remembers every call."""

    def __init__(self) -> None:
        super().__init__(NoSettings())
        self.calls: list[tuple[Any, ...]] = []

    @hookimpl
    def run_opened(self, run_dir: str, job: Mapping[str, Any]) -> None:
        self.calls.append(("run_opened", run_dir, job))

    @hookimpl
    def run_resumed(self, past: Callable[[], Iterator[Mapping[str, Any]]]) -> None:
        self.calls.append(("run_resumed", list(past())))

    @hookimpl
    def event(self, event: Mapping[str, Any]) -> None:
        self.calls.append(("event", event))

    @hookimpl
    def notice(self, text: str) -> None:
        self.calls.append(("notice", text))

    @hookimpl
    def metrics(self, record: Mapping[str, Any]) -> None:
        self.calls.append(("metrics", record))

    @hookimpl
    def run_closed(self, status: str, summary: Mapping[str, Any]) -> None:
        self.calls.append(("run_closed", status, summary))

    def close(self) -> None:
        self.calls.append(("close",))


class Faulty(Recorder):
    """Raises at its second event."""

    @hookimpl
    def event(self, event: Mapping[str, Any]) -> None:
        super().event(event)
        if len(self.calls) == 2:
            raise ZeroDivisionError("no")


def managed(*observers: Observer) -> ObserverManager:
    manager = ObserverManager()
    for number, observer in enumerate(observers):
        manager.register(observer, name=f"{type(observer).__name__.lower()}-{number}")
    return manager


def test_hook_run_opened_brings_the_directory_and_the_resolved_job() -> None:
    recorder = Recorder()
    managed(recorder).run_opened("runs/a", {"job": {"name": "toy"}})
    assert recorder.calls == [("run_opened", "runs/a", {"job": {"name": "toy"}})]


def test_hook_run_resumed_lets_each_observer_read_the_past_from_its_beginning() -> None:
    one, other = Recorder(), Recorder()
    managed(one, other).run_resumed(lambda: iter([EVENT]))
    assert one.calls == other.calls == [("run_resumed", [EVENT])]


def test_hook_notice_brings_the_line() -> None:
    recorder = Recorder()
    managed(recorder).notice("stopping")
    assert recorder.calls == [("notice", "stopping")]


def test_hook_event_brings_the_line_of_the_log() -> None:
    recorder = Recorder()
    managed(recorder).event(EVENT)
    assert recorder.calls == [("event", EVENT)]


def test_hook_metrics_brings_the_record() -> None:
    recorder = Recorder()
    managed(recorder).metrics({"reward/mean": 0.5})
    assert recorder.calls == [("metrics", {"reward/mean": 0.5})]


def test_hook_run_closed_brings_the_summary_and_then_the_observer_is_closed_once() -> None:
    recorder = Recorder()
    manager = managed(recorder)
    manager.run_closed("completed", {"audit": "PASS"})
    manager.event(EVENT)
    assert recorder.calls == [("run_closed", "completed", {"audit": "PASS"}), ("close",)]


def test_an_observer_names_only_the_arguments_it_uses() -> None:
    class Short(Observer):
        seen = ""

        @hookimpl
        def run_closed(self, status: str) -> None:
            self.seen = status

    short = Short(NoSettings())
    managed(short).run_closed("stopped", {})
    assert short.seen == "stopped"


def test_an_observer_that_raises_is_reported_once_closed_and_not_called_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    faulty = Faulty()
    manager = managed(faulty)
    with caplog.at_level(logging.ERROR):
        for _ in range(5):
            manager.event(EVENT)
        manager.run_closed("completed", {})
    assert faulty.calls == [("event", EVENT), ("event", EVENT), ("close",)]
    assert manager.disabled == {"faulty-0": "event: ZeroDivisionError: no"}
    (record,) = caplog.records
    assert record.getMessage() == "observer 'faulty-0' raised in event and is switched off; the run goes on"
    assert record.exc_info is not None


def test_an_observer_that_raises_costs_the_others_nothing(caplog: pytest.LogCaptureFixture) -> None:
    before, faulty, after = Recorder(), Faulty(), Recorder()
    manager = managed(before, faulty, after)
    for _ in range(4):
        manager.event(EVENT)
    manager.run_closed("completed", {})
    assert before.calls == after.calls == [("event", EVENT)] * 4 + [("run_closed", "completed", {}), ("close",)]


def test_an_observer_that_raises_while_closing_is_reported_too(caplog: pytest.LogCaptureFixture) -> None:
    class Stuck(Recorder):
        def close(self) -> None:
            raise OSError("gone")

    manager = managed(Stuck())
    manager.run_closed("completed", {})
    assert manager.disabled == {"stuck-0": "close: OSError: gone"}
    assert "raised in close" in caplog.text


def test_an_interruption_is_not_an_observers_fault() -> None:
    class Interrupted(Recorder):
        @hookimpl
        def event(self, event: Mapping[str, Any]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        managed(Interrupted()).event(EVENT)


def test_a_hook_nobody_specified_is_refused() -> None:
    class Misspelt(Observer):
        @hookimpl
        def run_open(self, run_dir: str) -> None: ...

    with pytest.raises(ContractError, match="run_open") as caught:
        managed(Misspelt(NoSettings()))
    assert "Misspelt" in caught.value.origin
    assert "ObserverHooks" in caught.value.fix


def test_an_argument_nobody_specified_is_refused() -> None:
    class Misspelt(Observer):
        @hookimpl
        def event(self, evnet: Mapping[str, Any]) -> None: ...

    with pytest.raises(ContractError, match="evnet"):
        managed(Misspelt(NoSettings()))


def test_an_observer_without_any_hook_is_refused() -> None:
    class Forgot(Observer):
        def event(self, event: Mapping[str, Any]) -> None: ...

    with pytest.raises(ContractError, match="implements no hook") as caught:
        managed(Forgot(NoSettings()))
    assert "hookimpl" in caught.value.fix
