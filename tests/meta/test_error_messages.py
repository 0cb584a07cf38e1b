"""Errors teach: four parts, and every class has a test of a message that is really raised."""

from __future__ import annotations

import ast
import functools
import inspect
from pathlib import Path

import pytest

import headrace.errors
from headrace.errors import HeadraceError

TESTS = Path(__file__).parents[1]
ERRORS = [c for _, c in inspect.getmembers(headrace.errors, inspect.isclass) if issubclass(c, HeadraceError)]


def test_an_error_prints_what_happened_where_and_what_to_do() -> None:
    error = HeadraceError("it broke", origin="run.toml:3", fix="mend it")
    assert str(error) == "it broke\n  from: run.toml:3\n  fix:  mend it"
    assert str(HeadraceError("it broke")) == "it broke"


def test_the_module_opens_with_the_whole_tree() -> None:
    tree = headrace.errors.__doc__ or ""
    assert [error.__name__ for error in ERRORS if error.__name__ not in tree] == []


@pytest.mark.parametrize("error", [e for e in ERRORS if e is not HeadraceError], ids=lambda error: error.__name__)
def test_every_error_class_has_a_message_test(error: type[HeadraceError]) -> None:
    assert error.__name__ in _errors_with_message_tests(), (
        f'no test expects a {error.__name__} with pytest.raises({error.__name__}, match="...")'
    )


@functools.cache
def _errors_with_message_tests() -> set[str]:
    names: set[str] = set()
    for path in TESTS.rglob("test_*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.Call) or ast.unparse(node.func) != "pytest.raises" or not node.args:
                continue
            if any(keyword.arg == "match" for keyword in node.keywords):
                names.add(ast.unparse(node.args[0]))
    return names
