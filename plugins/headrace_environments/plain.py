"""Any Python value as plain values (text, numbers, lists, maps) and back, for tasks that travel between processes.

Tuples, sets and maps with other keys than text come back as they were, because verifiers tell them apart; an
object of another kind comes back as its text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

TAG = "$"
"""The only key of a tagged value: ``{"$": [kind, content]}``."""


def to_plain(value: Any) -> Any:
    """``value`` as plain values that :func:`from_plain` turns back."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bool | float | str | None):
        return value
    if isinstance(value, int):
        return value if -(2**63) <= value < 2**64 else {TAG: ["int", str(value)]}
    if isinstance(value, list):
        return [to_plain(v) for v in value]
    if isinstance(value, tuple):
        return {TAG: ["tuple", [to_plain(v) for v in value]]}
    if isinstance(value, set | frozenset):
        return {TAG: ["set", [to_plain(v) for v in sorted(value, key=repr)]]}
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value) and TAG not in value:
            return {k: to_plain(v) for k, v in value.items()}
        return {TAG: ["map", [[to_plain(k), to_plain(v)] for k, v in value.items()]]}
    return str(value)


def from_plain(value: Any) -> Any:
    """The value that :func:`to_plain` was given."""
    if isinstance(value, list | tuple):
        return [from_plain(v) for v in value]
    if not isinstance(value, dict):
        return value
    if TAG not in value:
        return {k: from_plain(v) for k, v in value.items()}
    kind, content = value[TAG]
    if kind == "int":
        return int(content)
    if kind == "map":
        return {from_plain(k): from_plain(v) for k, v in content}
    items = [from_plain(v) for v in content]
    return tuple(items) if kind == "tuple" else set(items)
