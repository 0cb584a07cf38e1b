"""Rows, groups and leases as a test believes them to be, and values that tell every put from every other."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.contract import Array, Column, Ragged, Storage
from headrace.dataplane import ColumnSchema, Rows
from headrace.dataplane.unit import stored_names

COLUMNS = {
    "tokens": ColumnSchema("int32", ragged=True),
    "reward": ColumnSchema("float32"),
    "pixels": ColumnSchema("uint8", (2,), ragged=True),
}
READS: dict[str, tuple[str, ...]] = {"score": ("tokens",), "look": ("pixels",), "train": ("tokens", "reward")}
STORED, DUPLICATE, LATE, UNKNOWN = range(4)


@dataclass
class Row:
    values: dict[str, Array] = field(default_factory=dict)
    units: dict[str, str] = field(default_factory=dict)


@dataclass
class Group:
    version: int
    rows: list[Row]
    gone: str = ""
    """Why it left."""
    held: dict[str, int] = field(default_factory=dict)
    done: set[str] = field(default_factory=set)


@dataclass
class Held:
    rows: Rows
    groups: list[int]
    deadline: float


def value(column: str, serial: int) -> Array:
    """Different for every put."""
    if column == "reward":
        return np.array(serial, dtype=np.float32)
    if column == "tokens":
        return np.arange(serial, serial + serial % 5, dtype=np.int32)
    return np.full((serial % 3, 2), serial % 251, dtype=np.uint8)


def join(column: str, values: list[Array]) -> Column:
    kind = COLUMNS[column]
    if not kind.ragged:
        return np.array(values, dtype=kind.dtype).reshape(len(values))
    if not values:
        return Ragged(np.empty((0, *kind.shape), kind.dtype), np.zeros(1, np.int64))
    return Ragged.from_arrays(values)


def has(storage: Storage, row: int, column: str) -> bool:
    try:
        storage.get([row], stored_names("phase", [column]))
    except KeyError:
        return False
    return True
