"""Plugins that break one rule of every role each; ``breaks`` names the rule's test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from headrace.contract import Plugin
from headrace.testing.suites import PluginContract


@dataclass(frozen=True, kw_only=True)
class Sound:
    """Settings with nothing wrong."""

    size: int = 1


@dataclass(kw_only=True)
class Melting:
    """Settings that can be changed."""

    size: int = 1


@dataclass(frozen=True, kw_only=True)
class Opaque:
    """Settings that no job file can spell."""

    size: Any = field(default_factory=object)


class Broken(PluginContract):
    """Subclasses say which plugin."""

    Kind: type[Plugin]

    @pytest.fixture
    def plugin(self) -> Plugin:
        return self.Kind(self.Kind.Settings())


class TestIsOfAnotherTime(Broken):
    breaks = "test_it_is_built_for_this_contract_version"

    class Kind(Plugin):
        Settings = Sound
        contract_version = 0


class TestCanBeChanged(Broken):
    breaks = "test_settings_are_a_frozen_keyword_only_dataclass"

    class Kind(Plugin):
        Settings = Melting


class TestCannotBeSpelt(Broken):
    breaks = "test_settings_travel_as_plain_values"

    class Kind(Plugin):
        Settings = Opaque


class TestLeavesTraces(Broken):
    breaks = "test_preflight_accepts_what_works_and_leaves_nothing"

    class Kind(Plugin):
        Settings = Sound

        @classmethod
        def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
            (Path(directory) / "probe").touch()
