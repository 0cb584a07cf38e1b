"""Broadcasts to observers and protects the run from them.

Invariant: no exception of an observer reaches the caller. An observer that raises is reported once on the log with
its traceback, closed, and never called again; ``disabled`` says which and why.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pluggy

from headrace.errors import ContractError
from headrace.hooks import PROJECT, Observer, ObserverHooks

logger = logging.getLogger(__name__)


class ObserverManager:
    """The observers of one run."""

    def __init__(self) -> None:
        self._managers: dict[str, pluggy.PluginManager] = {}
        self._disabled: dict[str, str] = {}

    @property
    def disabled(self) -> Mapping[str, str]:
        """Observers that raised: name → hook and error."""
        return self._disabled

    def register(self, observer: Observer, *, name: str) -> None:
        """Add an observer. ContractError when it implements no hook or not as specified."""
        # A manager for each: pluggy stops a broadcast at the first exception, and one observer's must not cost the
        # others the call.
        manager = pluggy.PluginManager(PROJECT)
        manager.add_hookspecs(ObserverHooks)
        origin = f"observer {name!r} ({type(observer).__module__}.{type(observer).__qualname__})"
        try:
            manager.register(observer, name=name)
            manager.check_pending()
        except pluggy.PluginValidationError as error:
            raise ContractError(
                str(error), origin=origin, fix="use the hook names and arguments of headrace.hooks.ObserverHooks"
            ) from error
        if not manager.get_hookcallers(observer):
            raise ContractError(
                "the observer implements no hook, so it would never be called",
                origin=origin,
                fix="decorate its methods with headrace.hooks.hookimpl",
            )
        self._managers[name] = manager

    def run_opened(self, run_dir: str, job: Mapping[str, Any]) -> None:
        """See :meth:`ObserverHooks.run_opened`."""
        self._broadcast("run_opened", run_dir=run_dir, job=job)

    def event(self, event: Mapping[str, Any]) -> None:
        """See :meth:`ObserverHooks.event`."""
        self._broadcast("event", event=event)

    def metrics(self, record: Mapping[str, Any]) -> None:
        """See :meth:`ObserverHooks.metrics`."""
        self._broadcast("metrics", record=record)

    def run_resumed(self, past: Callable[[], Iterator[Mapping[str, Any]]]) -> None:
        """See :meth:`ObserverHooks.run_resumed`."""
        self._broadcast("run_resumed", past=past)

    def notice(self, text: str) -> None:
        """See :meth:`ObserverHooks.notice`."""
        self._broadcast("notice", text=text)

    def run_closed(self, status: str, summary: Mapping[str, Any]) -> None:
        """See :meth:`ObserverHooks.run_closed`; then every observer is closed."""
        self._broadcast("run_closed", status=status, summary=summary)
        for name in list(self._managers):
            self._close(name)

    def _broadcast(self, hook: str, **arguments: Any) -> None:
        for name, manager in list(self._managers.items()):
            try:
                getattr(manager.hook, hook)(**arguments)
            except Exception as error:  # the supervisor of observers: whatever they raise, the run goes on
                self._disable(name, hook, error)

    def _disable(self, name: str, hook: str, error: Exception) -> None:
        self._disabled[name] = f"{hook}: {type(error).__name__}: {error}"
        logger.error("observer %r raised in %s and is switched off; the run goes on", name, hook, exc_info=error)
        self._close(name)

    def _close(self, name: str) -> None:
        observer = self._managers.pop(name).get_plugin(name)
        assert isinstance(observer, Observer)
        try:
            observer.close()
        except Exception as error:  # as above
            self._disabled.setdefault(name, f"close: {type(error).__name__}: {error}")
            logger.error("observer %r raised in close", name, exc_info=error)
