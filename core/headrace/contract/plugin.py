"""What every plugin shares: a settings class, a contract version, and how it is constructed.

A plugin is a class. Its nested ``Settings`` is a standard dataclass (frozen, keyword-only): the
job file's table, less ``use``, is validated against it before anything starts, and the class is
constructed with the result: ``plugin = cls(settings)``. Neither importing the plugin's module nor
constructing it may import an engine; engines are imported in ``start``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from headrace.contract.setup import Setup

CONTRACT_VERSION = 1
"""Raised when a role changes in a way that breaks existing plugins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NoSettings:
    """For plugins that take no settings."""


class Plugin:
    """Base of all roles."""

    Settings: ClassVar[type[Any]] = NoSettings
    contract_version: ClassVar[int] = CONTRACT_VERSION

    def __init__(self, settings: Any) -> None:
        self.settings = settings

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        """Raise a HeadraceError for what could not work once started: a file that is missing, a name that is unknown.
        ``headrace check`` asks, in the interpreter that the plugin will live in: be quick, import no engine and leave
        nothing behind.
        ``directory``: the job file's. ``origin(key)``: where that setting was written, for errors."""

    @classmethod
    def setup(cls) -> Setup | None:
        """What `headrace env create` makes an interpreter of, for a plugin whose engine has one of its own. None: the
        plugin's extra says what it needs."""
        return None
