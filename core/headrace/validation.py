"""Plain values (from a job file or a message) against dataclasses and models.

Every mistake becomes a :class:`Problem` that names the key, what was expected and what to do; the caller adds
where it came from. Values keep their type: ``"3"`` is not a number and ``true`` is not 1.

Invariant: all problems of a table are found, not only the first.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import typing
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import UnionType
from typing import Any, TypeVar, Union

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError, create_model
from pydantic_core import ErrorDetails

T = TypeVar("T")
LONGEST = 100
"""Characters of a value that are shown."""
LIKENESS = 0.7
"""Of a name and what it was probably meant to be, at least: below it, ``port`` would be ``transport``."""
Path = tuple[str | int, ...]
"""Keys and list positions from the validated table to a value."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One mistake. ``path``: where, relative to the validated table."""

    path: Path
    message: str
    fix: str = ""
    missing: bool = False
    """Nothing stands at ``path``, and something must."""
    meant: Path = ()
    """Where an unknown key probably belongs."""


def near_miss(name: str, candidates: Iterable[str]) -> str | None:
    """The candidate that ``name`` was probably meant to be."""
    matches = difflib.get_close_matches(name, sorted(candidates), n=1, cutoff=LIKENESS)
    return matches[0] if matches else None


def unknown_key(path: Path, candidates: Iterable[str]) -> Problem:
    """The problem of a key that nothing reads."""
    name, known = str(path[-1]), sorted(candidates)
    meant = near_miss(name, known)
    message = f"unknown key {name!r}; known here: {', '.join(known) or 'none'}"
    if meant:
        message += f". Did you mean {meant!r}?"
        return Problem(path=path, message=message, fix=f"rename it to {meant}", meant=(*path[:-1], meant))
    return Problem(path=path, message=message, fix="remove it")


def validate(kind: type[T], table: Mapping[str, Any]) -> tuple[T | None, list[Problem]]:
    """``table`` as a ``kind`` (a dataclass or a pydantic model), or None and what is wrong with it."""
    if problems := list(_not_numbers(table)):
        return None, problems
    # A standard dataclass inherits the configuration of the model it is validated in, also when nested.
    wrapper = create_model("Table", __config__=ConfigDict(extra="forbid"), value=(kind, ...))
    try:
        # JSON mode is strict about types and still reads an array as a tuple and a table as a dataclass.
        model = wrapper.model_validate_json(json.dumps({"value": table}, default=str), strict=True)
    except ValidationError as error:
        problems = [_problem(kind, details) for details in error.errors(include_url=False)]
        renamed = {problem.meant for problem in problems if problem.meant}
        return None, [problem for problem in problems if not (problem.missing and problem.path in renamed)]
    return typing.cast("T", getattr(model, "value")), []  # noqa: B009 - the field exists only at run time


def _not_numbers(value: Any, path: Path = ()) -> Iterator[Problem]:
    """NaN, wherever it stands: it passes no comparison, so that no bound would hold it back."""
    items = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else ()
    for step, inner in items:
        yield from _not_numbers(inner, (*path, step))
    if isinstance(value, float) and math.isnan(value):
        yield Problem(path=path, message=f"{_name(path)}is nan, which is no number", fix="write a number")


def keys_at(kind: Any, path: Path = ()) -> frozenset[str]:
    """The keys a table at ``path`` inside ``kind`` may have; empty where any key may stand."""
    for step in path:
        kind = _descend(kind, step)
    kind = _table_type(kind)
    return frozenset(_field_types(kind)) if kind is not None else frozenset()


def dump(value: Any) -> dict[str, Any]:
    """A dataclass or model as plain values: the inverse of :func:`validate`."""
    plain = TypeAdapter(type(value)).dump_python(value, mode="json")
    return typing.cast("dict[str, Any]", plain)


def _problem(kind: Any, details: ErrorDetails) -> Problem:
    path: Path = tuple(details["loc"][1:])
    code, message = details["type"], details["msg"]
    if code in ("extra_forbidden", "unexpected_keyword_argument"):
        return unknown_key(path, keys_at(kind, path[:-1]))
    if code in ("missing", "missing_argument"):
        fix = f"add {path[-1]} = ..." if isinstance(path[-1], str) else "give the list all of its values"
        return Problem(path=path, message=f"{_name(path)}is missing", fix=fix, missing=True)
    if code == "value_error":
        return Problem(path=path, message=message.removeprefix("Value error, "), fix="correct it, or leave it out")
    for theirs, ours in _WORDS.items():
        message = message.replace(theirs, ours, 1)
    value = details.get("input")
    found = repr(value) if isinstance(value, float) else json.dumps(value, default=str, ensure_ascii=False)
    found = found if len(found) <= LONGEST else f"{found[:LONGEST]}..."
    return Problem(path=path, message=f"{_name(path)}{message}; found {found}", fix=_correction(details))


def _name(path: Path) -> str:
    """The last key with the list positions that follow it, and a space."""
    text = ""
    for step in path:
        text = f"{text}[{step}]" if isinstance(step, int) else step
    return f"{text} " if text else ""


_WORDS = {
    "Input should": "should",
    "String should": "should",
    "Tuple should": "should",
    "Value should": "should",
    "be an object": "be a table",
    "be a valid dictionary": "be a table",
    "be a valid array": "be a list",
}
"""What pydantic says → what a job file calls it."""

_FORMS = {
    "int": "write a whole number, without quotes",
    "float": "write a number, without quotes",
    "string": 'write text in quotes: "..."',
    "finite": "write a number with an end",
    "bool": "write true or false",
    "list": "write a list: [..., ...]",
    "tuple": "write a list: [..., ...]",
    "dict": "write a table: { key = value }",
    "model": "write a table: { key = value }",
    "dataclass": "write a table: { key = value }",
}
"""What was expected, as pydantic's error types begin → how a job file writes it."""

_BOUNDS = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
_SIZES = {"min_length": "at least", "max_length": "at most"}


def _correction(details: ErrorDetails) -> str:
    """What to do about a value that cannot be what it must be."""
    context = details.get("ctx", {})
    for name, words in _BOUNDS.items():
        if name in context:
            return f"choose a value {words} {context[name]}"
    for name, words in _SIZES.items():
        if name in context:
            unit = "character" if details["type"].startswith("string") else "value"
            return f"give it {words} {context[name]} {unit}{'s' * (context[name] != 1)}"
    if details["type"] != "literal_error":
        return _FORMS.get(details["type"].partition("_")[0], "correct the value")
    choices = [part.strip(" '") for part in str(context["expected"]).replace(" or ", ",").split(",")]
    meant = near_miss(str(details.get("input")), choices)
    return f"did you mean {meant!r}?" if meant else f"choose one of {', '.join(choices)}"


def _field_types(kind: Any) -> Mapping[str, Any]:
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return {name: field.annotation for name, field in kind.model_fields.items()}
    hints = typing.get_type_hints(kind)
    return {field.name: hints[field.name] for field in dataclasses.fields(kind) if field.init}


def _table_type(kind: Any) -> Any:
    """The dataclass or model among the alternatives of ``kind``."""
    options = typing.get_args(kind) if typing.get_origin(kind) in (Union, UnionType) else (kind,)
    for option in options:
        if isinstance(option, type) and (dataclasses.is_dataclass(option) or issubclass(option, BaseModel)):
            return option
    return None


def _descend(kind: Any, step: str | int) -> Any:
    if isinstance(step, str):
        table = _table_type(kind)
        return _field_types(table).get(step) if table is not None else None
    items = [a for a in typing.get_args(kind) if a is not Ellipsis]
    return items[min(step, len(items) - 1)] if items else None
