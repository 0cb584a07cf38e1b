"""Makes the virtual environment in which an engine can live, and says with which commands a person would.

Invariant: a directory that is there is never written to; one that could not be finished is removed again.
"""

from __future__ import annotations

import dataclasses
import json
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import distribution
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

from packaging.specifiers import SpecifierSet
from packaging.version import Version

from headrace.contract import Setup
from headrace.engines.known import engine_named
from headrace.errors import ConfigError, PluginError, RunError
from headrace.registry import Listed

VENVS = "venvs"
"""Folder, where the command is given, of what is made without being told where."""
OWN = "headrace"
VERSION_DEADLINE = 60.0
TAIL_LINES = 8

_VERSION = "import platform; print(platform.python_version())"


def home(name: str) -> Path:
    """Where an engine's environment is made without being told where."""
    return Path(VENVS) / name


def interpreter(directory: Path) -> Path:
    """Of a virtual environment."""
    return directory / "bin" / "python"


def create(
    name: str,
    *,
    directory: Path | None = None,
    python: str = "",
    lock: Path | None = None,
    tell: Callable[[str], None],
) -> Path:
    """Make the environment of an engine; the interpreter in it. ``python``: makes it, instead of this one. ``lock``:
    instead of the plugin's own. ``tell``: every command before it is run.

    PluginError for an engine that is not there or says nothing of its setup, ConfigError for a directory that is
    there and an interpreter that does not fit, RunError when a command fails."""
    listed, setup = engine_named(name)
    directory = home(name) if directory is None else directory
    python = python or sys.executable
    if lock is not None:
        setup = dataclasses.replace(setup, lock=str(lock), requirements=()) if setup else Setup(lock=str(lock))
    _require_room(directory, name)
    _require_python(python, setup, name)
    if setup is not None and setup.note:
        tell(f"note: {setup.note}")
    begun = [python, "-m", "venv", str(directory)]
    try:
        for command in (begun, *installing(interpreter(directory), listed, setup)):
            tell(f"$ {shlex.join(command)}")
            _run(command, setup)
    except BaseException:  # interrupted too: what is half made is of no use; raised again
        shutil.rmtree(directory, ignore_errors=True)
        tell(f"removed {directory}, which is not finished")
        raise
    return interpreter(directory).absolute()


def installing(python: Path | str, listed: Listed, setup: Setup | None) -> list[list[str]]:
    """Commands that install an engine, its plugin and headrace into an environment that has neither."""
    pip = [str(python), "-m", "pip", "install"]
    if setup is None and not listed.extra:
        raise PluginError(
            f"{listed.role} {listed.name!r} does not say what its interpreter must have",
            origin=listed.target,
            fix="set it up as its own documents say; its author can say it in Plugin.setup",
        )
    own = [OWN] if listed.distribution in ("", OWN) else [OWN, listed.distribution]
    if setup is None:
        *others, last = own
        return [[*pip, *(word for each in others for word in _as_here(each)), *_as_here(last, extra=listed.extra)]]
    here = [word for each in own for word in _as_here(each)]
    named = [*pip, "--ignore-requires-python"] if setup.any_python else pip
    if setup.lock:
        return [[*named, "--no-deps", "-r", setup.lock], [*pip, "--no-deps", *here]]
    return [[*named, *setup.requirements, *here]]


def _as_here(name: str, *, extra: str = "") -> list[str]:
    """What pip installs to have a distribution as this interpreter has it: from the same place (PEP 610)."""
    found, bracket = distribution(name), f"[{extra}]" if extra else ""
    told = json.loads(found.read_text("direct_url.json") or "{}")
    place = urlparse(told.get("url", ""))
    path = Path(url2pathname(place.path))
    if place.scheme == "file" and path.exists():
        return ["-e", f"{path}{bracket}"] if told.get("dir_info", {}).get("editable") else [f"{path}{bracket}"]
    if vcs := told.get("vcs_info"):
        return [f"{name}{bracket} @ {vcs['vcs']}+{told['url']}@{vcs['commit_id']}"]
    return [f"{name}{bracket}=={found.version}"]


def _require_room(directory: Path, name: str) -> None:
    if directory.exists():
        raise ConfigError(
            f"{directory} is there already, and nothing in it was changed",
            fix=f"use what is there, if it is {name}'s: python = {str(interpreter(directory.absolute()))!r}; "
            "or name another directory with --dir",
        )


def _require_python(python: str, setup: Setup | None, name: str) -> None:
    wanted = SpecifierSet(setup.python if setup is not None else "")
    version = _version_of(python)
    if not wanted.contains(Version(version), prereleases=True):
        raise ConfigError(
            f"{name} is set up with Python {wanted}, and {python} is Python {version}",
            fix="name an interpreter of such a version: --python python3.11, for example",
        )


def _version_of(python: str) -> str:
    path = shutil.which(python)
    if path is None:
        raise ConfigError(f"interpreter {python} is not there", fix="--python: the path, or name, of a Python")
    command = [path, "-c", _VERSION]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=VERSION_DEADLINE, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"interpreter {python} cannot be run: {error}", fix="--python: give a Python") from error
    if done.returncode:
        raise ConfigError(f"interpreter {python} is no Python that works", fix="--python: give a Python")
    return done.stdout.strip()


def _run(command: Sequence[str], setup: Setup | None) -> None:
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    if done.returncode:
        tail = "\n".join(f"    | {line}" for line in done.stdout.splitlines()[-TAIL_LINES:])
        note = setup.note if setup is not None else ""
        raise RunError(
            f"{shlex.join(command[:4])} … ended with status {done.returncode}",
            origin=f"its last words\n{tail}",
            fix=note or "see what pip says; it reads its index from PIP_INDEX_URL and PIP_EXTRA_INDEX_URL",
        )
