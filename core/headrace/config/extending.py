"""A job file over another: ``extends = "OTHER.toml"`` begins with all that the other says.

Tables are laid over those of the other key by key, and a ``[[phase]]`` over the one of its name; a phase of a new name
comes after the others. A table that names another plugin, or another kind of model, takes the place of the whole
table, and so do values and lists. Relative paths, in either file, are from the folder of the job that is loaded.
Invariant: every value keeps the place where it was written, in whichever file that is.
"""

from __future__ import annotations

from collections.abc import Mapping
from os.path import normpath
from pathlib import Path
from typing import Any, TypeGuard

from headrace.config.sources import Sources, read_sources
from headrace.errors import ConfigError
from headrace.validation import Path as KeyPath

EXTENDS = "extends"
_SELECTORS = ("use", "policy", "scheme")
_MODELS = {"path", "scratch"}


def read_extended(file: Path, *, name: str, extending: tuple[Path, ...] = ()) -> Sources:
    """The job file and what it extends as one. ``name``: what messages call it; ``extending``: files that are being
    read. ConfigError when one of them is no TOML, cannot be read, or extends itself."""
    own = read_sources(file, name=name)
    if EXTENDS not in own.data:
        return own
    origin = own.origin((EXTENDS,))
    other, files = own.data.pop(EXTENDS), (*extending, file.resolve())
    if not isinstance(other, str) or not (file.parent / other).is_file():
        fix = "give the path of a job file, from the folder of this one"
        raise ConfigError(f"extends names no file: {other!r}", origin=origin, fix=fix)
    if (file.parent / other).resolve() in files:
        raise ConfigError(f"extends names {other!r}, which extends this file", origin=origin, fix="remove one of both")
    base = read_extended(file.parent / other, name=normpath(Path(name).parent / other), extending=files)
    _lay_over(base, own, base.data, own.data, (), ())
    base.file = own.file
    return base


def _lay_over(
    base: Sources, own: Sources, under: dict[str, Any], over: Mapping[str, Any], place: KeyPath, written: KeyPath
) -> None:
    """``over``, the table of ``own`` at ``written``, over ``under``, that of ``base`` at ``place``."""
    for key, value in over.items():
        to, of, kept = (*place, key), (*written, key), under.get(key)
        if isinstance(value, dict) and isinstance(kept, dict) and not _another(kept, value):
            base.places |= {to: own.places[of]} if of in own.places else {}
            _lay_over(base, own, kept, value, to, of)
        elif to == ("phase",) and _phases(value) and _phases(kept):
            _lay_phases_over(base, own, kept, value)
        else:
            under[key] = value
            _take_places(base, own, to, of)


def _lay_phases_over(base: Sources, own: Sources, under: list[dict[str, Any]], over: list[dict[str, Any]]) -> None:
    named = {phase["name"]: index for index, phase in enumerate(under) if isinstance(phase.get("name"), str)}
    for index, phase in enumerate(over):
        name = phase.get("name")
        at = named.get(name, len(under)) if isinstance(name, str) else len(under)
        to, of = ("phase", at), ("phase", index)
        if at < len(under):
            _lay_over(base, own, under[at], phase, to, of)
        else:
            under.append(phase)
            _take_places(base, own, to, of)


def _another(kept: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """Whether ``value`` is of another plugin, or of another kind of model, than ``kept``."""
    if any(key in value and value[key] != kept.get(key) for key in _SELECTORS):
        return True
    return len(_MODELS & {*kept, *value}) > 1


def _phases(value: Any) -> TypeGuard[list[dict[str, Any]]]:
    return isinstance(value, list) and all(isinstance(phase, dict) for phase in value)


def _take_places(base: Sources, own: Sources, to: KeyPath, of: KeyPath) -> None:
    """Of what ``own`` has at ``of`` and ``base`` now at ``to``, in place of what stood there."""
    base.places = {path: place for path, place in base.places.items() if path[: len(to)] != to}
    base.places |= {(*to, *path[len(of) :]): place for path, place in own.places.items() if path[: len(of)] == of}
