"""Roles stay small, and a package's ``__all__`` is what it offers."""

from __future__ import annotations

import ast
import importlib
import inspect
from pathlib import Path

import pytest

import headrace.contract
from headrace.contract import Plugin
from headrace.registry import ROLES

ROOT = Path(__file__).parents[2]
ABSTRACT = sorted(
    (value for value in vars(headrace.contract).values() if inspect.isclass(value) and inspect.isabstract(value)),
    key=lambda cls: cls.__name__,
)
WITH_ALL = sorted(
    path.relative_to(ROOT)
    for path in ROOT.glob("*/headrace*/**/__init__.py")
    if "__all__" in path.read_text() and path.relative_to(ROOT).parts[0] in ("core", "adapters", "plugins")
)


@pytest.mark.parametrize("cls", ABSTRACT, ids=lambda cls: cls.__name__)
def test_a_role_or_capability_has_at_most_seven_abstract_methods(cls: type) -> None:
    assert len(getattr(cls, "__abstractmethods__")) <= 7  # noqa: B009 - ABCMeta's attribute is unknown to typing


@pytest.mark.parametrize("cls", ABSTRACT, ids=lambda cls: cls.__name__)
def test_parameters_after_the_first_two_are_keyword_only(cls: type) -> None:
    """A method's subject, and what it is applied to, read well by position; options do not."""
    for name in sorted(getattr(cls, "__abstractmethods__")):  # noqa: B009 - as above
        method = inspect.getattr_static(cls, name)
        function = getattr(method, "__func__", method)
        if not inspect.isfunction(function):
            continue
        positional = [p for p in inspect.signature(function).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD]
        assert len(positional) <= 3, f"{cls.__name__}.{name}"


def test_every_role_derives_from_plugin() -> None:
    assert all(issubclass(base, Plugin) for base in ROLES.values())


@pytest.mark.parametrize("path", WITH_ALL, ids=str)
def test_all_is_complete_and_sorted(path: Path) -> None:
    module = importlib.import_module(".".join(path.parent.parts[1:]))
    public = [
        alias.asname or alias.name
        for node in ast.parse((ROOT / path).read_text()).body
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headrace")
        for alias in node.names
        if not (alias.asname or alias.name).startswith("_")
    ]
    assert sorted(module.__all__, key=_isort_style) == module.__all__
    assert set(public) <= set(module.__all__)
    assert all(hasattr(module, name) for name in module.__all__)


def _isort_style(name: str) -> tuple[int, str]:
    """Constants, classes, functions."""
    return (0 if name.isupper() else 1 if name[:1].isupper() else 2), name
