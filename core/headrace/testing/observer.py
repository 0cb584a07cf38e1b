"""An observer that writes down what it is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from headrace.contract import NoSettings
from headrace.hooks import Observer, hookimpl


class FakeObserver(Observer):
    """``told``: (hook, what it was given), in order."""

    Settings = NoSettings

    def __init__(self, settings: NoSettings) -> None:
        super().__init__(settings)
        self.told: list[tuple[str, Any]] = []

    @hookimpl
    def run_opened(self, run_dir: str, job: Mapping[str, Any]) -> None:
        """A run begins."""
        self.told.append(("run_opened", (run_dir, job)))

    @hookimpl
    def run_resumed(self, past: Callable[[], Iterator[Mapping[str, Any]]]) -> None:
        """It goes on from these events."""
        self.told.append(("run_resumed", list(past())))

    @hookimpl
    def event(self, event: Mapping[str, Any]) -> None:
        """Something happened."""
        self.told.append(("event", event))

    @hookimpl
    def metrics(self, record: Mapping[str, Any]) -> None:
        """A batch was trained."""
        self.told.append(("metrics", record))

    @hookimpl
    def notice(self, text: str) -> None:
        """A line to be read now."""
        self.told.append(("notice", text))

    @hookimpl
    def run_closed(self, status: str, summary: Mapping[str, Any]) -> None:
        """The run is over."""
        self.told.append(("run_closed", (status, summary)))

    def close(self) -> None:
        """Nothing is held."""
        self.told.append(("close", None))
