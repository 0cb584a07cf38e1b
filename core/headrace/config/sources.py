"""Where every value of a job came from: a line of the job file, ``--set`` on the command line, or a default.

Invariant: a place is exact or the nearest enclosing table's; it is never another key's.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headrace.config.toml import format_key, format_value
from headrace.errors import ConfigError
from headrace.validation import Path as KeyPath

T = TypeVar("T")

_TOKEN = re.compile(
    r'"""(?:\\.|[^\\])*?"{3,5}'
    + r"|'''.*?'{3,5}"
    + r'|"(?:\\.|[^"\\\n])*"'
    + r"|'[^'\n]*'|\#[^\n]*|[\[\]{}]|\n|[^\"'\#\[\]{}\n]+",
    re.DOTALL,
)
_REPAIRS = {
    "Cannot overwrite a value": "write every key once, and a name either as [table], as [[list of tables]] or as a key",
    "Cannot declare": "write every table once, with all of its keys below it; only [[phase]] may be repeated",
    "Cannot mutate": "write every table once, with all of its keys in one place",
    "Duplicate inline": "write every key once",
    "Expected newline": "write one key = value a line, and text in quotes",
    "Expected '=' after": "write key = value, or [table]",
    "Expected ']'": "close the bracket: [table], [[phase]] or [a, list]",
    "Invalid statement": "write key = value, or [table], and notes after #",
    "": 'a value is "text", a number, true, false, [a list] or { a = "table" }',
}
"""What tomllib says → what to do; the first that fits."""
_KEY = re.compile(r"""\s*(?:"((?:\\.|[^"\\])*)"|'([^']*)'|([\w-]+))\s*""")


@dataclass(slots=True)
class Sources:
    """A job file's values and where each was written."""

    file: str
    data: dict[str, Any]
    places: dict[KeyPath, str] = field(default_factory=dict)
    """``FILE:LINE``, of the file itself or of one that it extends."""
    overrides: dict[KeyPath, str] = field(default_factory=dict)

    def origin(self, *candidates: KeyPath) -> str:
        """The place of the first candidate that is written down; else of the nearest table that encloses one."""
        for depth in range(max(map(len, candidates), default=0) + 1):
            for path in candidates:
                place = self._place(path[: len(path) - depth]) if depth < len(path) else ""
                if place:
                    return place
        return self.file

    def written(self, path: KeyPath) -> bool:
        """Whether the job says this itself."""
        return path in self.places or path in self.overrides

    def value(self, path: KeyPath) -> Any:
        """What stands at ``path``, or None."""
        value: Any = self.data
        for step in path:
            try:
                value = value[step]
            except (KeyError, IndexError, TypeError):
                return None
        return value

    def override(self, text: str) -> None:
        """Apply ``a.b=value``. ConfigError when it cannot be applied."""
        origin = f"--set {text}"
        dotted, equals, value = text.partition("=")
        keys = [key.strip() for key in dotted.split(".")]
        if not equals or not all(keys):
            raise ConfigError(
                f"{text!r} is not of the form a.b=value", origin=origin, fix="for example --set rollout.instances=4"
            )
        table: Any = self.data
        path: KeyPath = ()
        for key in keys[:-1]:
            made = isinstance(table, dict) and key not in table
            table, path = _enter(table, path, key, origin)
            if made:
                self.overrides[path] = origin
        if not isinstance(table, dict):
            raise ConfigError(f"{'.'.join(keys[:-1])} is not a table", origin=origin, fix="set a key of a table")
        table[keys[-1]] = _parse_value(value.strip())
        path = (*path, keys[-1])
        self.places = {known: place for known, place in self.places.items() if known[: len(path)] != path}
        self.overrides = {known: place for known, place in self.overrides.items() if known[: len(path)] != path}
        self.overrides[path] = origin
        _fill(self.overrides, path, table[keys[-1]])

    def _place(self, path: KeyPath) -> str:
        if path in self.overrides:
            return self.overrides[path]
        if path not in self.places:
            return ""
        *table, key = (format_key(step) for step in path if isinstance(step, str))
        value = self.value(path)
        here = f"[{'.'.join(table)}] " if table else ""
        if isinstance(value, dict) or (isinstance(value, list) and any(isinstance(v, dict) for v in value)):
            return f"{self.places[path]}  [{'.'.join([*table, key])}]"
        return f"{self.places[path]}  {here}{key} = {_short(format_value(value))}"


def read_sources(file: Path, *, name: str) -> Sources:
    """Parse a job file. ``name``: what messages call it. ConfigError, with the line, when it is not TOML."""
    name = name or '""'
    try:
        text = file.read_text(encoding="utf-8-sig")  # some editors put a byte order mark first
    except OSError as error:
        reason = "it is a directory" if file.is_dir() else (error.strerror or str(error))
        raise ConfigError(
            f"cannot read the job file: {reason}", origin=name, fix="give the path of a TOML file"
        ) from None
    except UnicodeDecodeError:
        raise ConfigError("the job file is not UTF-8 text", origin=name, fix="save it as UTF-8") from None
    try:
        data, places = tomllib.loads(text), {path: f"{name}:{line}" for path, line in key_lines(text).items()}
        _fill(places, (), data)
        return Sources(file=name, data=data, places=places)
    except (ValueError, RecursionError) as error:  # beyond TOML's own: an endless number, or brackets in brackets
        line = re.search(r"at line (\d+)", str(error))
        number = int(line.group(1)) if line else text.rstrip().count("\n") + 1
        lines = text.split("\n")
        written = _short(lines[number - 1].strip()) if number <= len(lines) else ""
        fix = next(words for part, words in _REPAIRS.items() if part in str(error))
        raise ConfigError(f"not valid TOML: {error}", origin=f"{name}:{number}  {written}", fix=fix) from None


def key_lines(text: str) -> dict[KeyPath, int]:
    """The line of every table and key of a valid TOML text, but of keys inside an inline table."""
    lines: dict[KeyPath, int] = {}
    counts: dict[KeyPath, int] = {}
    table: KeyPath = ()
    for number, statement in _statements(text):
        if statement.startswith("["):
            repeated = statement.startswith("[[")
            keys = _keys(statement.strip("[] \t"))
            if repeated:
                parent = (*_indexed(keys[:-1], counts), keys[-1])
                counts[parent] = counts.get(parent, -1) + 1
            table = _indexed(keys, counts)
            lines[table] = number
            if repeated:
                lines.setdefault(table[:-1], number)
        else:
            path = (*table, *_keys(statement))
            for depth in range(len(table) + 1, len(path) + 1):
                lines.setdefault(path[:depth], number)
    return lines


def _fill(places: dict[KeyPath, T], path: KeyPath, value: Any) -> None:
    """Every key below ``path`` that has no place of its own is where the table is that it stands in."""
    items: Iterable[tuple[Any, Any]] = ()
    if isinstance(value, dict):
        items = value.items()
    elif isinstance(value, list):
        items = [(index, item) for index, item in enumerate(value) if isinstance(item, dict)]
    for step, inner in items:
        if path in places:
            places.setdefault((*path, step), places[path])
        _fill(places, (*path, step), inner)


def _statements(text: str) -> list[tuple[int, str]]:
    """(line, text) of every header and assignment, comments removed."""
    statements: list[tuple[int, str]] = []
    number, start, depth, current = 1, 1, 0, ""
    for token in _TOKEN.findall(text + "\n"):
        if token == "\n" and depth == 0:
            if current.strip():
                statements.append((start, current.strip()))
            current = ""
        elif not token.startswith("#"):
            if not current.strip():
                start, current = number, ""
            current += token
            depth += {"[": 1, "{": 1, "]": -1, "}": -1}.get(token, 0)
        number += token.count("\n")
    return statements


def _keys(text: str) -> tuple[str, ...]:
    """The dotted key that ``text`` begins with."""
    keys: list[str] = []
    position = 0
    while match := _KEY.match(text, position):
        keys.append(next(group for group in match.groups() if group is not None))
        position = match.end()
        if text[position : position + 1] != ".":
            break
        position += 1
    return tuple(keys)


def _indexed(keys: Sequence[str], counts: Mapping[KeyPath, int]) -> KeyPath:
    """The path of a header: a key that is an array of tables is followed by the index of its last table."""
    path: KeyPath = ()
    for key in keys:
        path = (*path, key)
        if path in counts:
            path = (*path, counts[path])
    return path


def _enter(table: Any, path: KeyPath, key: str, origin: str) -> tuple[Any, KeyPath]:
    """The table or list under ``key``; a list's entries are picked by position or by their ``name``."""
    if isinstance(table, list):
        for index, item in enumerate(table):
            if key == str(index) or (isinstance(item, dict) and item.get("name") == key):
                return item, (*path, index)
        raise ConfigError(
            f"{path[-1]} has no entry {key!r}",
            origin=origin,
            fix=f"use a name or a position from 0 to {len(table) - 1}",
        )
    if not isinstance(table, dict):
        raise ConfigError(f"{'.'.join(map(str, path))} is not a table", origin=origin, fix="set the value itself")
    return table.setdefault(key, {}), (*path, key)


def _parse_value(text: str) -> Any:
    """A TOML value; anything that is none is text."""
    try:
        parsed = tomllib.loads(f"value = {text}")
    except (ValueError, RecursionError):  # as in read_sources
        return text
    return parsed["value"] if set(parsed) == {"value"} else text


def _short(text: str, limit: int = 60) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."
