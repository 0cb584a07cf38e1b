"""Asks another Python interpreter whether a node could live in it.

The question is put by running it once, with a deadline; nothing of the job is started.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import headrace
from headrace.errors import ConfigError, HeadraceError, PluginError
from headrace.registry import PluginSpec

DEADLINE = 60.0
"""Seconds; a cold interpreter on a network disk is slow."""

_QUESTION = """
import json, sys
role, use, directory = sys.argv[1:]
import headrace
from headrace.errors import HeadraceError
from headrace.registry import load, require
answer = {"version": headrace.__version__, "message": "", "fix": ""}
try:
    load(role, use, directory=directory)
    require(role, use)
except HeadraceError as error:
    answer.update(message=error.message, fix=error.fix)
print(json.dumps(answer))
"""


def check_interpreter(python: str, spec: PluginSpec, *, origin: str) -> None:
    """ConfigError when ``python`` cannot be run; PluginError when it lacks headrace or the plugin."""
    error = _ask(python, spec.role, spec.use, spec.directory, origin)
    if error is not None:
        raise error


def _ask(python: str, role: str, use: str, directory: str, origin: str) -> HeadraceError | None:
    path = shutil.which(python)
    if path is None:
        what = "is not there" if "/" in python and not Path(python).exists() else "cannot be run"
        fix = "give a path relative to the job file, or the name of a command"
        return ConfigError(f"interpreter {python} {what}", origin=origin, fix=fix)
    command = [path, "-c", _QUESTION, role, use, directory]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE, check=False)
    except subprocess.TimeoutExpired:
        message = f"interpreter {python} did not answer in {DEADLINE:.0f} s whether it has {role} {use!r}"
        return ConfigError(message, origin=origin, fix="run it by hand and see what it waits for")
    except OSError as error:
        return ConfigError(
            f"interpreter {python} cannot be run: {error}", origin=origin, fix="give a Python interpreter"
        )
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it said nothing"])[-1]
        fix = f"{python} -m pip install headrace=={headrace.__version__}"
        return PluginError(f"interpreter {python} cannot use headrace: {last}", origin=origin, fix=fix)
    return _judge(python, done.stdout, origin)


def _judge(python: str, said: str, origin: str) -> HeadraceError | None:
    last = (said.splitlines() or ["nothing"])[-1]
    try:
        answer = json.loads(last)
        answer["version"]
    except (ValueError, TypeError, KeyError):
        message = f"interpreter {python} is no Python: asked for its headrace, it said {last[:60]!r}"
        return ConfigError(message, origin=origin, fix="give a Python interpreter")
    if answer["version"] != headrace.__version__:
        return PluginError(
            f"interpreter {python} has headrace {answer['version']}, this is {headrace.__version__}",
            origin=origin,
            fix=f"{python} -m pip install headrace=={headrace.__version__}",
        )
    if answer["message"]:
        fix = answer["fix"].replace("pip install", f"{python} -m pip install", 1)
        return PluginError(f"interpreter {python}: {answer['message']}", origin=origin, fix=fix)
    return None
