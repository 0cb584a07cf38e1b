"""Asks another Python interpreter whether a plugin of a node could start in it.

The question is put by running it once, with a deadline; nothing of the job is started.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

import headrace
from headrace import errors
from headrace.contract import CONTRACT_VERSION
from headrace.errors import ConfigError, HeadraceError, PluginError
from headrace.registry import PluginSpec

DEADLINE = 60.0
"""Seconds; a cold interpreter on a network disk is slow."""

_RAISED = re.compile(r"[\w.]*(Error|Exception)\b")
"""Begins the last line of a Python that raised."""

_QUESTION = """
import json, sys
import headrace
from headrace.contract import CONTRACT_VERSION
from headrace.errors import ContractError, HeadraceError
from headrace.registry import load, require, settings_of
role, use, directory, settings, places = json.load(sys.stdin)
error = HeadraceError("")
try:
    cls = load(role, use, directory=directory)
    require(role, use)
    if places is not None:
        cls.preflight(settings_of(cls, settings), directory=directory, origin=lambda key: places.get(key, ""))
except HeadraceError as raised:
    error = raised
except Exception as raised:
    message = f"{role} {use!r}: preflight raised {type(raised).__name__}: {raised}"
    error = ContractError(message, fix=f"correct {cls.__name__}.preflight")
answer = {"version": headrace.__version__, "contract": CONTRACT_VERSION, "error": type(error).__name__}
print(json.dumps({**answer, "message": error.message, "origin": error.origin, "fix": error.fix}))
"""


def check_interpreter(python: str, spec: PluginSpec, places: Mapping[str, str] | None, *, origin: str) -> None:
    """ConfigError when ``python`` cannot be run; PluginError when it lacks headrace or the plugin; what the plugin's
    ``preflight`` raises there. ``places``: where each setting was written, None for settings that are wrong already;
    ``origin``: where ``python`` was."""
    question = json.dumps([spec.role, spec.use, spec.directory, spec.settings, places], default=str)
    error = _ask(python, spec, question, origin)
    if error is not None:
        raise error


def _ask(python: str, spec: PluginSpec, question: str, origin: str) -> HeadraceError | None:
    path = shutil.which(python)
    if path is None:
        what = "is not there" if "/" in python and not Path(python).exists() else "cannot be run"
        fix = "give a path relative to the job file, or the name of a command"
        return ConfigError(f"interpreter {python} {what}", origin=origin, fix=fix)
    command = [path, "-c", _QUESTION]
    try:
        done = subprocess.run(command, input=question, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        message = f"interpreter {python} did not answer in {DEADLINE:.0f} s whether it has {spec.role} {spec.use!r}"
        return ConfigError(message, origin=origin, fix="run it by hand and see what it waits for")
    except OSError as error:
        return ConfigError(
            f"interpreter {python} cannot be run: {error}", origin=origin, fix="give a Python interpreter"
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
        if not _RAISED.match(last):
            return _no_python(python, last, origin)
        fix = f"{python} -m pip install headrace=={headrace.__version__}"
        return PluginError(f"interpreter {python} cannot use headrace: {last}", origin=origin, fix=fix)
    return _judge(python, done.stdout, origin)


def _no_python(python: str, said: str, origin: str) -> ConfigError:
    message = f"interpreter {python} is no Python that works: asked for its headrace, it said {said[:60]!r}"
    return ConfigError(message, origin=origin, fix="give a Python interpreter")


def _judge(python: str, said: str, origin: str) -> HeadraceError | None:
    last = (said.splitlines() or ["nothing"])[-1]
    try:
        answer = json.loads(last)
        theirs = answer["version"], answer["contract"]
    except (ValueError, TypeError, KeyError):
        return _no_python(python, last, origin)
    own = headrace.__version__, CONTRACT_VERSION
    if theirs != own:
        return PluginError(
            f"interpreter {python} has headrace {theirs[0]} of contract version {theirs[1]}, "
            f"this is {own[0]} of contract version {own[1]}",
            origin=origin,
            fix=f"{python} -m pip install headrace=={headrace.__version__}",
        )
    if answer["message"]:
        fix = answer["fix"].replace("pip install", f"{python} -m pip install", 1)
        kind = getattr(errors, answer["error"], PluginError)
        assert issubclass(kind, HeadraceError)
        return kind(f"interpreter {python}: {answer['message']}", origin=answer["origin"] or origin, fix=fix)
    return None
