"""The rules of every role: settings that travel, and a look ahead that finds nothing wrong with what works.

Part of every role's suite; subclass that one.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from headrace.contract import CONTRACT_VERSION, Plugin
from headrace.testing.suites.rules import check, override, rule
from headrace.validation import dump, validate


class PluginContract:
    """What a plugin of any role keeps. Every suite has its own :meth:`plugin`."""

    @pytest.fixture
    def plugin(self) -> Any:
        """A constructed plugin."""
        override("plugin", "a plugin of the suite's role")

    @pytest.fixture
    def directory(self, tmp_path: Path) -> str:
        """The job file's folder: relative paths in settings start from it."""
        return str(tmp_path)

    @rule("A plugin is built for this version of the contract.")
    def test_it_is_built_for_this_contract_version(self, plugin: Plugin) -> None:
        found = plugin.contract_version
        check(found == CONTRACT_VERSION, f"it was built for version {found}, this is {CONTRACT_VERSION}")

    @rule("`Settings` is a frozen dataclass whose fields are all keyword-only.")
    def test_settings_are_a_frozen_keyword_only_dataclass(self, plugin: Plugin) -> None:
        cls = type(plugin).Settings
        check(dataclasses.is_dataclass(cls), f"{cls.__name__} is no dataclass")
        loose = [field.name for field in dataclasses.fields(cls) if not field.kw_only]
        frozen = cls.__dataclass_params__.frozen
        check(frozen and not loose, f"frozen: {frozen}; fields that are not keyword-only: {', '.join(loose) or 'none'}")

    @rule("Settings travel as plain values: written as a table and read again, they are the same.")
    def test_settings_travel_as_plain_values(self, plugin: Plugin) -> None:
        table = dump(plugin.settings)
        again, problems = validate(type(plugin).Settings, table)
        check(not problems, f"{table} is refused: {'; '.join(problem.message for problem in problems)}")
        check(again == plugin.settings, f"{plugin.settings} came back as {again}")

    @rule("`preflight` accepts settings that work, and leaves nothing behind.")
    def test_preflight_accepts_what_works_and_leaves_nothing(self, plugin: Plugin, directory: str) -> None:
        before = sorted(Path(directory).rglob("*"))
        type(plugin).preflight(plugin.settings, directory=directory, origin=lambda key: f"the suite's {key}")
        left = sorted(set(Path(directory).rglob("*")) - set(before))
        check(not left, f"it left {', '.join(map(str, left))}")
