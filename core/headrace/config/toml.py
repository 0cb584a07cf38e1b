"""Writing TOML: a resolved job is a job file again.

Invariant: reading back what :func:`dumps` wrote gives equal values (None is left out, TOML has none).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from datetime import date, time
from typing import Any


def dumps(table: Mapping[str, Any]) -> str:
    """``table`` as a TOML document."""
    return "\n".join(_table(table, ())).lstrip("\n") + "\n"


def format_value(value: Any) -> str:
    """One value, tables inline."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else repr(value).replace("Infinity", "inf")
    if isinstance(value, date | time):  # a datetime is a date
        return value.isoformat()
    if isinstance(value, Mapping):
        inner = ", ".join(f"{format_key(k)} = {format_value(v)}" for k, v in value.items() if v is not None)
        return f"{{ {inner} }}" if inner else "{}"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(format_value, value))}]"
    raise ValueError(f"TOML has no value like {value!r}")


def format_key(key: str) -> str:
    """Quoted where it must be."""
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else format_value(key)


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> list[str]:
    present = {key: value for key, value in table.items() if value is not None}
    nested = {k: v for k, v in present.items() if isinstance(v, Mapping) or _is_table_list(v)}
    lines = [f"{format_key(k)} = {format_value(v)}" for k, v in present.items() if k not in nested]
    for key, value in nested.items():
        inner = (*path, key)
        header = ".".join(map(format_key, inner))
        if isinstance(value, Mapping):
            lines += ["", f"[{header}]", *_table(value, inner)]
        else:
            for item in value:
                lines += ["", f"[[{header}]]", *_table(item, inner)]
    return lines


def _is_table_list(value: Any) -> bool:
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(item, Mapping) for item in value)
