"""Role and name to class: how every plugin, built in or not, is found.

A ``use`` has one of three forms: a name (an entry point of the group ``headrace.<role>``), ``module:Class``, or
``./file.py:Class`` relative to the job file. Nothing is imported until it is selected, or a key is looked for that
the selected plugin lacks.

Invariant: a class that :func:`load` returns fills its role, was built for this contract version and leaves no
abstract method open.
"""

from __future__ import annotations

import dataclasses
import hashlib
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from importlib.metadata import Distribution, EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

from packaging.requirements import Requirement

from headrace.contract import (
    CONTRACT_VERSION,
    Algorithm,
    Environment,
    InferenceEngine,
    Launcher,
    Plugin,
    Quantization,
    StalenessPolicy,
    Storage,
    TrainingEngine,
    WeightTransport,
)
from headrace.errors import ConfigError, ContractError, HeadraceError, PluginError
from headrace.hooks import Observer
from headrace.validation import Problem, keys_at, near_miss, validate

ROLES: Mapping[str, type[Plugin]] = MappingProxyType(
    {
        "algorithm": Algorithm,
        "environment": Environment,
        "inference_engine": InferenceEngine,
        "launcher": Launcher,
        "observer": Observer,
        "quantization": Quantization,
        "staleness": StalenessPolicy,
        "storage": Storage,
        "training_engine": TrainingEngine,
        "weight_transport": WeightTransport,
    }
)
"""Every role and the class its plugins derive from."""

FORMS = 'a name, "module:Class" or "./file.py:Class"'


@dataclass(frozen=True, slots=True, kw_only=True)
class PluginSpec:
    """A selected plugin as plain values: what a job file says and what travels to a node."""

    role: str
    use: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The plugin's own keys, not yet validated against its ``Settings``."""
    origin: str = ""
    """Where it was selected, for messages."""
    directory: str = "."
    """What ``./file.py:Class`` is relative to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listed:
    """One installed plugin, not imported."""

    role: str
    name: str
    target: str
    """``module:Class``."""
    distribution: str
    version: str
    missing: str
    """What its extra still needs, or empty."""
    extra: str
    """Of its distribution, which it needs, or empty."""
    needs: tuple[str, ...]
    """Distributions that the extra names."""


def load(role: str, use: str, *, directory: str = ".", origin: str = "") -> type[Plugin]:
    """The class that ``use`` names. PluginError when it cannot be had, ContractError when it does not fill ``role``."""
    if role not in ROLES:
        raise ValueError(f"unknown role {role!r}; roles: {', '.join(ROLES)}")
    place, colon, name = use.rpartition(":")
    if not colon and re.fullmatch(r"[\w-]+", use):
        found = _load_entry_point(_entry_point(role, use, origin), role, origin)
    elif place and re.fullmatch(r"[A-Za-z_]\w*", name):
        module = _load_file(place, directory, origin) if _is_file(place) else _load_module(place, origin)
        found = _attribute(module, name, place, origin)
    else:
        fix = f'use = "{use}:Class"' if _is_file(use) else f"write {FORMS}"
        raise PluginError(f"{use!r} does not name a plugin; expected {FORMS}", origin=origin, fix=fix)
    return _checked(found, role, use, origin)


def build(spec: PluginSpec) -> Plugin:
    """An instance of the selected plugin with its settings. Raises what :func:`load`, :func:`require` and
    :func:`settings_of` raise."""
    cls = load(spec.role, spec.use, directory=spec.directory, origin=spec.origin)
    require(spec.role, spec.use, origin=spec.origin)
    return cls(settings_of(cls, spec.settings, origin=spec.origin))


def settings_of(cls: type[Plugin], table: Mapping[str, Any], *, origin: str = "") -> Any:
    """``table`` as an instance of ``cls.Settings``. ConfigError names every problem."""
    settings, problems = judge_settings(cls, table, origin=origin)
    if problems:
        message = "; ".join(f"{'.'.join(map(str, p.path))}: {p.message}" if p.path else p.message for p in problems)
        raise ConfigError(f"settings of {cls.__name__}: {message}", origin=origin, fix=problems[0].fix)
    return settings


def judge_settings(cls: type[Plugin], table: Mapping[str, Any], *, origin: str = "") -> tuple[Any, list[Problem]]:
    """``table`` as an instance of ``cls.Settings``, or None and every problem. ContractError when the class itself
    cannot be validated against, for example for an annotation that names nothing."""
    try:
        return validate(cls.Settings, table)
    except Exception as error:  # annotations and __post_init__ are a plugin's code; wrapped once, here
        reason = next(iter(str(error).splitlines()), "")
        raise ContractError(
            f"settings of {cls.__name__} cannot be validated: {type(error).__name__}: {reason}",
            origin=origin,
            fix="annotate them with plain types, and raise ValueError for a wrong value",
        ) from error


def require(role: str, use: str, *, origin: str = "") -> None:
    """PluginError when this interpreter lacks what the named plugin's extra asks for. Imports nothing."""
    if ":" in use:
        return
    point = _entry_point(role, use, origin)
    missing = _missing(point)
    if missing:
        raise PluginError(f"{role} {use!r} needs {missing}", origin=origin, fix=_install(point))


def absolute(use: str, *, directory: str) -> str:
    """The same selection, meaning the same from any directory."""
    place, colon, name = use.rpartition(":")
    return f"{(Path(directory) / place).resolve()}:{name}" if colon and _is_file(place) else use


def listing(role: str | None = None) -> list[Listed]:
    """Installed plugins by role and name; ``role``: only that one's."""
    return [
        Listed(
            role=group,
            name=point.name,
            target=f"{point.module}:{point.attr}",
            distribution=point.dist.name if point.dist else "",
            version=point.dist.version if point.dist else "",
            missing=_missing(point),
            extra=next(iter(point.extras), ""),
            needs=tuple(requirement.name for requirement in _required(point)),
        )
        for group in ([role] if role else ROLES)
        for point in sorted(_points(group), key=lambda p: p.name)
    ]


def having(role: str, key: str) -> list[str]:
    """Names of the installed plugins of a role that have a setting ``key``. One that cannot be loaded has none."""
    names = []
    for listed in listing(role):
        with suppress(HeadraceError):
            if key in keys_at(load(role, listed.name).Settings):
                names.append(listed.name)
    return names


def _points(role: str) -> list[EntryPoint]:
    return list(entry_points(group=f"headrace.{role}"))


def _entry_point(role: str, name: str, origin: str) -> EntryPoint:
    points = _points(role)
    matches = {(p.dist.name if p.dist else "", p.value): p for p in points if p.name == name}
    if len(matches) == 1:
        return next(iter(matches.values()))
    candidates = f"list candidates with: headrace plugins {role}"
    if not matches:
        names = sorted({p.name for p in points})
        meant = near_miss(name, names)
        raise PluginError(
            f"no {role} named {name!r}; installed: {', '.join(names) or 'none'}"
            + (f". Did you mean {meant!r}?" if meant else ""),
            origin=origin,
            fix=f'set use = "{meant}", or {candidates}' if meant else candidates,
        )
    owners = ", ".join(f"{dist} ({value})" for dist, value in sorted(matches))
    raise PluginError(
        f"{role} {name!r} is offered more than once: {owners}",
        origin=origin,
        fix="uninstall all but one of them, or name the class: use = " + f'"{next(iter(matches))[1]}"',
    )


def _load_entry_point(point: EntryPoint, role: str, origin: str) -> Any:
    module = _load_module(point.module, origin, point)
    return _attribute(module, point.attr, f"entry point {point.name!r} of headrace.{role}", origin)


def _load_module(name: str, origin: str, point: EntryPoint | None = None) -> ModuleType:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        absent = error.name or ""
        if name == absent or name.startswith(f"{absent}."):
            raise PluginError(
                f"there is no module {absent!r}",
                origin=origin,
                fix="install the package that has it into this interpreter, or correct the spelling",
            ) from error
        raise PluginError(
            f"{name} cannot be imported: the package of module {absent!r} is not installed",
            origin=origin,
            fix=_install(point, absent) if point else f"pip install {absent}",
        ) from error
    except (Exception, SystemExit) as error:  # a plugin's module may raise anything; it is wrapped once, here
        raise PluginError(
            f"{name} cannot be imported: {type(error).__name__}: {error}",
            origin=origin,
            fix=f'python -c "import {name}" shows where',
        ) from error


def _is_file(place: str) -> bool:
    return place.endswith(".py") or "/" in place


def _load_file(place: str, directory: str, origin: str) -> ModuleType:
    path = (Path(directory) / place).resolve()
    name = f"headrace_local_{hashlib.blake2s(str(path).encode(), digest_size=6).hexdigest()}_{path.stem}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise PluginError(
            f"there is no Python file {path}", origin=origin, fix="a relative path starts at the job file's folder"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up while the file runs
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a plugin's file may raise anything; it is wrapped once, here
        del sys.modules[name]
        raise PluginError(
            f"{path} cannot be imported: {type(error).__name__}: {error}", origin=origin, fix="run the file with python"
        ) from error
    return module


def _attribute(module: ModuleType, name: str, place: str, origin: str) -> Any:
    try:
        return getattr(module, name)
    except AttributeError:
        plugins = [n for n, v in vars(module).items() if inspect.isclass(v) and v.__module__ == module.__name__]
        meant = near_miss(name, plugins)
        raise PluginError(
            f"{place} has no class {name!r}; it defines: {', '.join(sorted(plugins)) or 'none'}"
            + (f". Did you mean {meant!r}?" if meant else ""),
            origin=origin,
            fix=f"name one of its classes, for example {place}:{meant or (plugins[0] if plugins else 'Class')}",
        ) from None


def _checked(found: Any, role: str, use: str, origin: str) -> type[Plugin]:
    base = ROLES[role]
    if not inspect.isclass(found) or not issubclass(found, base):
        others = _plugins_beside(found, base)
        name = getattr(found, "__name__", "Mine")
        raise ContractError(
            f"{use!r} cannot be the {role}: that must be a class derived from {base.__module__}.{base.__name__}",
            origin=origin,
            fix=f"name one that is: {', '.join(others)}" if others else f"derive it: class {name}({base.__name__})",
        )
    if found.contract_version != CONTRACT_VERSION:
        raise PluginError(
            f"{role} {use!r} was built for contract version {found.contract_version}, this is {CONTRACT_VERSION}",
            origin=origin,
            fix="install the plugin's release for this version of headrace",
        )
    open_methods = sorted(getattr(found, "__abstractmethods__", ()))
    if open_methods:
        raise ContractError(
            f"{role} {use!r} does not implement {', '.join(open_methods)}",
            origin=origin,
            fix=f"implement every abstract method of {base.__name__}",
        )
    if not dataclasses.is_dataclass(found.Settings):
        raise ContractError(
            f"{role} {use!r}: Settings must be a dataclass",
            origin=origin,
            fix="decorate it: @dataclass(frozen=True, kw_only=True)",
        )
    return found


def _plugins_beside(found: Any, base: type[Plugin]) -> list[str]:
    """Classes of the same module that derive from ``base``."""
    home = getattr(found, "__module__", "")
    names = vars(sys.modules[home]).items() if home in sys.modules else ()
    return sorted(n for n, v in names if inspect.isclass(v) and issubclass(v, base) and v.__module__ == home)


def _extra_requirements(dist: Distribution) -> Iterator[tuple[str, Requirement]]:
    """(extra, requirement) for every requirement that holds only with an extra."""
    extras = dist.metadata.get_all("Provides-Extra") or []
    for requirement in map(Requirement, dist.requires or []):
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            continue
        yield from ((extra, requirement) for extra in extras if requirement.marker.evaluate({"extra": extra}))


def _required(point: EntryPoint) -> list[Requirement]:
    """What the extras named by an entry point need."""
    if not point.extras or point.dist is None:
        return []
    return [requirement for extra, requirement in _extra_requirements(point.dist) if extra in point.extras]


def _missing(point: EntryPoint) -> str:
    """What the extras named by an entry point need and this interpreter lacks, as words."""
    words = []
    for requirement in _required(point):
        wanted = f"{requirement.name}{requirement.specifier}"
        try:
            found = version(requirement.name)
        except PackageNotFoundError:
            words.append(f"{wanted}, which is not installed")
            continue
        if not requirement.specifier.contains(found, prereleases=True):
            words.append(f"{wanted}, and finds {found}")
    return "; ".join(words)


def _install(point: EntryPoint, module: str = "") -> str:
    """The command that installs what a plugin lacks. ``module``: the absent one, to find its extra by name."""
    dist = point.dist
    if dist is None:
        return f"pip install {module}"
    extras = list(point.extras) or [
        extra for extra, requirement in _extra_requirements(dist) if _normal(requirement.name) == _normal(module)
    ]
    return f'pip install "{dist.name}[{extras[0]}]"' if extras else f"pip install {module}"


def _normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name.partition(".")[0]).lower()
