"""Rows, groups and leases as a test believes them to be, and values that tell every put from every other."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec
import numpy as np

from headrace.contract import Array, Column, Ragged, Storage
from headrace.dataplane import ColumnSchema, Rows
from headrace.dataplane.contents import whose
from headrace.dataplane.unit import stored_names

COLUMNS = {
    "tokens": ColumnSchema("int32", ragged=True),
    "reward": ColumnSchema("float32"),
    "pixels": ColumnSchema("uint8", (2,), ragged=True),
    "mark": ColumnSchema("float32"),
}
READS: dict[str, tuple[str, ...]] = {"score": ("tokens",), "look": ("pixels",), "train": ("tokens", "reward")}
WRITES = {"score": ("reward",), "look": ("mark",)}
"""What consumers may add to a row, and are done with it then. Nobody reads marks: who adds one may be the last."""
ALL = -1
"""In place of a member, for a consumer that is given whole groups."""
ID_BYTES = 8
"""For each row that shares a value, to say which."""
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
    held: dict[tuple[str, int], int] = field(default_factory=dict)
    """(consumer, member, or ``ALL``) → lease."""
    done: set[tuple[str, int]] = field(default_factory=set)

    def complete(self, member: int, columns: Collection[str]) -> bool:
        """Whether a member, or all of them, have the columns."""
        rows = self.rows if member == ALL else [self.rows[member]]
        return all(set(columns) <= row.values.keys() for row in rows)


@dataclass
class Held:
    rows: Rows
    ids: list[int]
    """Of groups, or of rows, as the consumer is given them."""
    deadline: float


class Kept(NamedTuple):
    """What is believed at the moment of a snapshot."""

    groups: dict[int, Group]
    lost: list[int]
    acknowledged: Counter[tuple[str, int]]
    attempts: Counter[tuple[str, int]]


class PlaneModel:
    """``by_row``, ``writes``: as in the partition's spec."""

    size: int
    by_row: set[str]
    writes: dict[str, tuple[str, ...]]
    shared: set[str]
    """Columns by content."""
    groups: dict[int, Group]

    @property
    def everybody(self) -> list[tuple[str, int]]:
        """Who must be done with a group before it leaves."""
        return [key for consumer in READS for key in self.keys(consumer)]

    def finish(self, group: Group) -> None:
        """Consumers are done with what has the columns that they add, and a group leaves when all are."""
        for consumer, adds in self.writes.items():
            group.done.update(key for key in self.keys(consumer) if group.complete(key[1], adds))
        if not group.gone and len(group.done) == len(self.everybody):
            group.gone = "done"

    def keys(self, consumer: str) -> list[tuple[str, int]]:
        """What of a group the consumer is given at a time."""
        return [(consumer, member) for member in (range(self.size) if consumer in self.by_row else [ALL])]

    def place(self, consumer: str, id: int) -> tuple[Group, tuple[str, int]]:
        number, member = divmod(id, self.size) if consumer in self.by_row else (id, ALL)
        return self.groups[number], (consumer, member)

    def ids(self, rows: Rows) -> list[int]:
        given: list[int] = rows.rows.tolist()
        return given if rows.consumer in self.by_row else [row // self.size for row in given[:: self.size]]

    def rows_of(self, consumer: str, ids: list[int]) -> list[int]:
        if consumer in self.by_row:
            return ids
        return [number * self.size + member for number in ids for member in range(self.size)]

    def ready(self, consumer: str, min_version: int = 0) -> list[int]:
        """Groups, or rows."""
        return [
            number if key[1] == ALL else number * self.size + key[1]
            for number, group in self.groups.items()
            if not group.gone and group.version >= min_version
            for key in self.keys(consumer)
            if key not in group.held and key not in group.done and group.complete(key[1], READS[consumer])
        ]

    def row(self, row: int) -> Row:
        return self.groups[row // self.size].rows[row % self.size]

    def value_of(self, row: int, name: str) -> Array:
        return self.row(row).values[name]

    def expected_code(self, row: int, column: str) -> int:
        group = self.groups.get(row // self.size)
        if group is None:
            return UNKNOWN
        if group.gone:
            return LATE
        return DUPLICATE if column in group.rows[row % self.size].values else STORED

    def cells(self, unit: str) -> list[tuple[int, str]]:
        return [
            (number * self.size + member, name)
            for number, group in self.groups.items()
            if not group.gone or group.held
            for member, row in enumerate(group.rows)
            for name, at in row.units.items()
            if at == unit
        ]

    def schemas(self) -> dict[str, ColumnSchema]:
        return {name: msgspec.structs.replace(COLUMNS[name], by_content=name in self.shared) for name in COLUMNS}

    def there(self, storage: Storage, row: int, column: str) -> bool:
        """Whether a unit's storage has the value of a row, or what tells which of those that rows share it has."""
        (name,) = stored_names("phase", (column,))
        try:
            storage.get([row], [whose(name) if column in self.shared else name])
        except KeyError:
            return False
        return True

    def nbytes_of(self, cells: list[tuple[int, str]]) -> int:
        """What rows share is kept once, and for each row which it is."""
        nbytes, once = 0, dict[tuple[str, bytes], int]()
        for row, name in cells:
            found = self.value_of(row, name)
            if name in self.shared:
                once[name, found.tobytes()] = found.nbytes
            nbytes += ID_BYTES if name in self.shared else found.nbytes
        return nbytes + sum(once.values())


def value(column: str, serial: int) -> Array:
    """Different for every put, but for pixels, of which there are twelve."""
    if column in ("reward", "mark"):
        return np.array(serial, dtype=np.float32)
    if column == "tokens":
        return np.arange(serial, serial + serial % 5, dtype=np.int32)
    return np.full((serial % 3, 2), serial % 4, dtype=np.uint8)


def join(column: str, values: list[Array]) -> Column:
    kind = COLUMNS[column]
    if not kind.ragged:
        return np.array(values, dtype=kind.dtype).reshape(len(values))
    if not values:
        return Ragged(np.empty((0, *kind.shape), kind.dtype), np.zeros(1, np.int64))
    return Ragged.from_arrays(values)
