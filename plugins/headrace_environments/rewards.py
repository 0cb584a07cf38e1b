"""Rewards that a job file names: ``"module:function"`` or ``"./file.py:function"``.

A reward is an ordinary function. It names the parameters it wants, in any order, out of

* ``prompt`` (str) and ``answer`` (str): what the policy read and wrote;
* ``record`` (dict): the task's own fields;
* ``finish_reason`` (str): ``"stop"`` when the policy ended its answer, ``"length"`` when the token limit did;

and returns a number, or a number and a map of named parts for the metrics. NaN means "cannot be scored".

Invariant: what a reward returns is a number or an error; nothing else becomes a score.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from headrace.contract import Score
from headrace.errors import ConfigError, ContractError

PARAMETERS = ("prompt", "answer", "record", "finish_reason")

Reward = Callable[[Mapping[str, Any]], Score]
"""Takes a value for each of :data:`PARAMETERS`."""


def load_reward(use: str, *, directory: str, origin: str) -> Reward:
    """The function that ``use`` names. ConfigError when there is none, or it cannot be called as a reward.

    ``directory``: what ``./file.py`` is relative to. ``origin``: where ``use`` was written."""
    place, _, name = use.rpartition(":")
    module = _load_file(place, directory, origin) if _is_file(place) else _load_module(place, origin)
    function = getattr(module, name, None)
    if function is None:
        names = [n for n, v in vars(module).items() if inspect.isfunction(v) and v.__module__ == module.__name__]
        close = difflib.get_close_matches(name, names, n=1)
        raise ConfigError(
            f"{place} has no function {name!r}; it defines: {', '.join(sorted(names)) or 'none'}"
            + (f". Did you mean {close[0]!r}?" if close else ""),
            origin=origin,
            fix=f"name a function of that file: {place}:{(close or names or ['function'])[0]}",
        )
    if not callable(function) or inspect.iscoroutinefunction(function):
        raise ConfigError(
            f"{use!r} is not a plain function",
            origin=origin,
            fix="write it with def: a reward has a process of its own and may block in it",
        )
    wanted = _wanted(function, use, origin)
    return lambda values: _score(function(**{name: values[name] for name in wanted}), use)


def _wanted(function: Callable[..., Any], use: str, origin: str) -> tuple[str, ...]:
    """Which of :data:`PARAMETERS` a reward asks for."""
    try:
        parameters = inspect.signature(function).parameters.values()
    except ValueError as error:  # some built-in functions do not tell
        raise ConfigError(
            f"reward {use!r} does not say what it asks for: {error}",
            origin=origin,
            fix="write a function around it: def reward(answer): ...",
        ) from error
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return PARAMETERS
    unknown = [
        p.name
        for p in parameters
        if p.kind is not p.VAR_POSITIONAL
        and (p.name not in PARAMETERS or p.kind is p.POSITIONAL_ONLY)
        and (p.default is p.empty or p.kind is p.POSITIONAL_ONLY)
    ]
    if unknown:
        raise ConfigError(
            f"reward {use!r} asks for {', '.join(unknown)}; a reward may ask, by name, for {', '.join(PARAMETERS)}",
            origin=origin,
            fix="rename its parameters, for example: def reward(prompt, answer, record)",
        )
    return tuple(p.name for p in parameters if p.name in PARAMETERS)


def _score(result: object, use: str) -> Score:
    parts: object = {}
    if isinstance(result, tuple) and len(result) == 2:
        result, parts = result
    if not _is_number(result) or not isinstance(parts, Mapping) or not all(map(_is_number, parts.values())):
        given = f"{result!r} and {parts!r}" if parts else repr(result)
        raise ContractError(
            f"reward {use!r} returned {given[:200]}",
            fix="return a number, or a number and a map of named numbers; NaN when the answer cannot be scored",
        )
    return Score(reward=_number(result), components={str(name): _number(part) for name, part in parts.items()})


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number | np.bool_) and not isinstance(value, np.complexfloating)


def _number(value: Any) -> float:
    return float(value)


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _load_module(name: str, origin: str) -> ModuleType:
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a user's module may raise anything; it is shown, with its cause
        raise ConfigError(
            f"module {name!r} cannot be imported: {type(error).__name__}: {error}",
            origin=origin,
            fix="correct the name, or install the module into the interpreter of the environment worker",
        ) from error


def _load_file(place: str, directory: str, origin: str) -> ModuleType:
    path = (Path(directory) / place).resolve()
    if not path.is_file():
        raise ConfigError(
            f"there is no reward file {path}", origin=origin, fix="a relative path starts at the job file's folder"
        )
    digest = hashlib.blake2s(str(path).encode(), digest_size=6).hexdigest()
    name = f"headrace_reward_{digest}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"{path} is not a Python file", origin=origin, fix="give the reward file the ending .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while the file runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # as in _load_module
        del sys.modules[name]
        raise ConfigError(
            f"{path} cannot be loaded: {type(error).__name__}: {error}", origin=origin, fix="run the file with python"
        ) from error
    return module
