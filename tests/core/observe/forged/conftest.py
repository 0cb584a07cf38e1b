"""A forger: an honest log, the means to tamper with it, and the audit that must notice."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from headrace.observe.audit import audit_run
from headrace.observe.lines import RecordLog

Event = dict[str, Any]


class Forger:
    """Lines of an honest log. ``insert`` and ``remove`` number the lines again, as a forger would."""

    def __init__(self, events: list[Event], path: Path) -> None:
        self.events: list[Event] = json.loads(json.dumps(events))
        self._path = path

    def all(self, kind: str, **fields: Any) -> list[Event]:
        """Events of a kind with these fields, of the reinforcement phase."""
        start = [e["kind"] for e in self.events].index("phase_started")
        if any(e["kind"] == "phase_started" for e in self.events[start + 1 :]):
            start += 1 + [e["kind"] for e in self.events[start + 1 :]].index("phase_started")
        return [
            e
            for e in self.events[start:]
            if e["kind"] == kind and all(e[name] == value for name, value in fields.items())
        ]

    def one(self, kind: str, **fields: Any) -> Event:
        """One of them, from the middle of the log."""
        found = self.all(kind, **fields)
        return found[len(found) // 2]

    def trained_group(self) -> tuple[int, list[int]]:
        """A group that was trained, and its trajectories."""
        group = self.one("batch_trained")["groups"][0]
        return group, self.one("group_dispatched", group=group)["trajectories"]

    def remove(self, event: Event) -> None:
        """Leave a line out."""
        self.events = [e for e in self.events if e is not event]
        self.renumber()

    def insert(self, after: Event, new: Event) -> None:
        """Add a line."""
        position = next(i for i, e in enumerate(self.events) if e is after) + 1
        self.events = [*self.events[:position], dict(new), *self.events[position:]]
        self.renumber()

    def renumber(self) -> None:
        """Hide that lines came or went."""
        for seq, event in enumerate(self.events):
            event["seq"] = seq

    def assert_caught(self, rule: str, shown: str) -> None:
        """The audit fails by ``rule``, with a message that matches ``shown``, at an event of the log."""
        with RecordLog(self._path) as log:
            for event in self.events:
                log.write(event)
        result = audit_run(self._path)
        assert not result.ok
        found = [v for v in result.violations if v.rule == rule and re.search(shown, v.message)]
        assert found, result.violations[:8]
        assert all(0 <= v.seq <= self.events[-1]["seq"] for v in found)


@pytest.fixture
def forger() -> type[Forger]:
    """For logs of other runs."""
    return Forger


@pytest.fixture
def log(simulation: Any, tmp_path: Path) -> Forger:
    """An honest log of two phases."""
    return Forger(simulation.events, tmp_path / "events.jsonl")


@pytest.fixture
def mishap_log(mishaps: Any, tmp_path: Path) -> Forger:
    """An honest log of a run that lost nodes and was resumed three times."""
    return Forger(mishaps.events, tmp_path / "events.jsonl")
