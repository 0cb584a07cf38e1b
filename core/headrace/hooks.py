"""Hooks of observers: what a run tells anybody who wants to watch.

An observer is a plugin of the role ``observer``: a subclass of :class:`Observer` with any of the methods of
:class:`ObserverHooks`, each decorated with :data:`hookimpl`. A method names only the arguments it uses. Observers are
called in the controller, one after the other, never on the per-token path; what they are given is theirs to read and
not to change. An observer cannot hurt a run: one that raises is reported once, closed and not called again.

    from headrace.hooks import Observer, hookimpl

    class Bell(Observer):
        @hookimpl
        def run_closed(self, status):
            print("\\a", status)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pluggy

from headrace.contract import Plugin

PROJECT = "headrace"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)


class Observer(Plugin):
    """Base of the role ``observer``."""

    def close(self) -> None:
        """Release what the observer holds (a file, a terminal). Called once: after ``run_closed``, or when the
        observer raised."""


class ObserverHooks:
    """The hooks. Signatures grow by addition only."""

    @hookspec
    def run_opened(self, run_dir: str, job: Mapping[str, Any]) -> None:
        """Before the first event. ``run_dir`` exists; ``job`` is the resolved job file as plain values."""

    @hookspec
    def run_resumed(self, past: Callable[[], Iterator[Mapping[str, Any]]]) -> None:
        """After ``run_opened``, when the run goes on from a checkpoint: ``past()`` reads the events that led there, as
        ``event`` got them. The next event is ``resumed``."""

    @hookspec
    def event(self, event: Mapping[str, Any]) -> None:
        """One line of ``events.jsonl``, after it was written. Up to thousands a second: be quick."""

    @hookspec
    def metrics(self, record: Mapping[str, Any]) -> None:
        """One line of ``metrics.jsonl``, after it was written: one per trained batch."""

    @hookspec
    def notice(self, text: str) -> None:
        """Something that a person who watches should read now, in one line."""

    @hookspec
    def run_closed(self, status: str, summary: Mapping[str, Any]) -> None:
        """After the last event, with every process of the run gone. ``status``: ``completed``, ``stopped`` or
        ``failed``. ``summary`` holds what there is of ``reason``, ``run_dir``, ``samples_before`` and
        ``samples_after`` (lists of ``{prompt, answer, reward}``, the same tasks in the same order), ``audit`` (verdict,
        one line), ``audit_ok``, ``report`` (path) and ``report_error`` (why there is no audit or report)."""
