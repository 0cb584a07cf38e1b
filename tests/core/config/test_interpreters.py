"""Another interpreter that a job names is a Python, has this headrace, and is asked for its plugin."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace
from headrace.contract import CONTRACT_VERSION

ErrorsOf = Callable[..., list[str]]


def test_an_interpreter_must_exist_and_have_headrace(errors_of: ErrorsOf, tmp_path: Path) -> None:
    (error,) = errors_of(("learning_rate", 'python = "./no/python"\nlearning_rate'))
    assert "no/python is not there" in error
    assert "[trainer] python" in error
    stranger = tmp_path / "python"
    stranger.write_text("#!/bin/sh\necho \"ModuleNotFoundError: No module named 'headrace'\" >&2\nexit 1\n")
    stranger.chmod(0o755)
    (error,) = errors_of(("learning_rate", 'python = "./python"\nlearning_rate'))
    assert "cannot use headrace: ModuleNotFoundError" in error
    assert "python -m pip install headrace==" in error


@pytest.mark.parametrize(
    "script", ["echo \"cat: invalid option -- 'c'\" >&2\nexit 1", "exit 1"], ids=["complains", "is_silent"]
)
def test_a_program_that_is_no_python_is_said_to_be_none(errors_of: ErrorsOf, tmp_path: Path, script: str) -> None:
    (tmp_path / "cat").write_text(f"#!/bin/sh\n{script}\n")
    (tmp_path / "cat").chmod(0o755)
    (error,) = errors_of(("learning_rate", 'python = "./cat"\nlearning_rate'))
    assert "cat is no Python" in error
    assert "  fix:  give a Python interpreter" in error


def test_an_interpreter_with_headrace_and_the_plugin_is_accepted(errors_of: ErrorsOf) -> None:
    assert errors_of(("learning_rate", f'python = "{sys.executable}"\nlearning_rate')) == []


def test_an_interpreter_is_asked_for_the_plugin(errors_of: ErrorsOf, tmp_path: Path) -> None:
    older = tmp_path / "python"
    answer = {"version": headrace.__version__, "contract": CONTRACT_VERSION, "error": "PluginError"}

    def answers(**changed: str | int) -> None:
        older.write_text(f"#!/bin/sh\necho '{json.dumps({**answer, **changed})}'\n")

    answers(version="0.0.1")
    older.chmod(0o755)
    (error,) = errors_of(("max_new_tokens", 'python = "./python"\nmax_new_tokens'))
    assert "has headrace 0.0.1 of contract version" in error
    answers(contract=7)
    (error,) = errors_of(("max_new_tokens", 'python = "./python"\nmax_new_tokens'))
    assert "of contract version 7, this is" in error
    assert f"of contract version {CONTRACT_VERSION}" in error
    answers(message="no torch", origin="", fix="pip install t")
    (error,) = errors_of(("max_new_tokens", 'python = "./python"\nmax_new_tokens'))
    assert "python: no torch" in error
    assert "python -m pip install t" in error
