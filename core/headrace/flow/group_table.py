"""Groups of rows with consecutive ids, and what is known of each: the part of the ledger that knows no consumers.

Columnar numpy arrays, no Python object per row; every operation is O(its own rows).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import numpy as np

from headrace.contract import Array
from headrace.flow.records import StoredGroup
from headrace.flow.table import Table

STORED, DUPLICATE, LATE, UNKNOWN = range(4)
"""What became of a row that was written. ``DUPLICATE``: it has one of the columns already; ``LATE``: its group was
acknowledged by all or dropped; ``UNKNOWN``: never opened. Only ``STORED`` changes anything."""
WRITTEN = ("stored", "duplicate", "late", "unknown")
"""The same in words."""

_NO_VERSION = np.iinfo(np.int64).max
MOST_COLUMNS = 63


def total(values: Array | int, count: int) -> int:
    """Of ``count`` values, or of ``count`` times one. numpy's reductions cost as much as half of the rest of a put."""
    if isinstance(values, int):
        return values * count
    return int(values.item() if count == 1 else values.sum())


def _table(size: int, *, columns: int, consumers: int, by_row: int, first: int) -> Table:
    per_group: dict[str, type[np.generic]] = {
        "opened": np.int64,
        "oldest": np.int64,
        "open": np.bool_,
        "reserved": np.bool_,
    }
    per_consumer: dict[str, type[np.generic]] = {"complete": np.int32, "state": np.int8, "attempts": np.int16}
    per_row: dict[str, type[np.generic]] = {"written": np.int64, "nbytes": np.int64, "tokens": np.int32}
    per_row_and_consumer: dict[str, type[np.generic]] = {"row_state": np.int8, "row_attempts": np.int16}
    return Table(
        {name: (kind, ()) for name, kind in per_group.items()}
        | {name: (kind, (consumers,)) for name, kind in per_consumer.items()},
        of_members={name: (kind, ()) for name, kind in per_row.items()}
        | {"units": (np.int16, (columns,))}
        | {name: (kind, (by_row,)) for name, kind in per_row_and_consumer.items()},
        members=size,
        first=first,
    )


class GroupTable:
    """``columns``: names of all there are; ``consumers``, ``by_row``: how many are given groups, and how many rows.
    ``nbytes``, ``buffered``: bytes and rows stored in groups that have not left."""

    def __init__(
        self, *, group_size: int, columns: Sequence[str], consumers: int, by_row: int, first_group: int
    ) -> None:
        if len(columns) > MOST_COLUMNS:
            raise ValueError(f"{len(columns)} columns; a ledger keeps at most {MOST_COLUMNS}")
        self.group_size = group_size
        self._bits = {column: 1 << place for place, column in enumerate(columns)}
        self._all = (1 << len(columns)) - 1
        self._groups = _table(group_size, columns=len(columns), consumers=consumers, by_row=by_row, first=first_group)
        self._first_group = first_group
        self.nbytes = 0
        self.buffered = 0
        self.awaited = 0
        """Values that an earlier ledger knew and that no storage unit has yet."""
        self._reserved: deque[int] = deque()
        """Groups to be opened before any new one, ascending; behind the first also such as are open by now."""

    @property
    def next_group(self) -> int:
        """The id of the next group that was never opened before."""
        return self._groups.end

    @property
    def oldest_group(self) -> int:
        """The first group that is open or reserved; :attr:`next_group` when none is."""
        return self._groups.low

    def stored_versions(self) -> Array:
        """The version of the oldest token of each open group with a row stored, int64. O(groups since the oldest)."""
        groups = np.arange(self._groups.low, self._groups.end)
        versions = self._column_of("oldest", groups)[self._column_of("open", groups)]
        stored: Array = versions[versions != _NO_VERSION]
        return stored

    @property
    def reserved(self) -> Collection[int]:
        """Groups that will be opened before any new one, ascending."""
        return [group for group in self._reserved if self._groups.get("reserved", group)]

    def reserve(self, count: int) -> range:
        """Groups with consecutive new ids, to be opened in any order."""
        first = self._groups.append(count)
        self._groups.columns["reserved"][self._groups.slice(first, count)] = True
        groups = range(first, first + count)
        self._reserved.extend(groups)
        return groups

    def open(self, version: int, group: int | None = None) -> int:
        """A group, whose rows are at best of ``version``; returns its id: the first that is reserved, if ``group`` does
        not name another of those, else :attr:`next_group`."""
        if not self._reserved:
            return self.open_many(1, version)
        if group is None:
            group = self._reserved[0]
        self._groups.set("reserved", group, False)
        while self._reserved and not self._groups.get("reserved", self._reserved[0]):
            self._reserved.popleft()
        self._begin(group, 1, version)
        return group

    def open_many(self, count: int, version: int) -> int:
        """Groups with consecutive new ids; returns the first."""
        first = self._groups.append(count)
        self._begin(first, count, version)
        return first

    def _begin(self, first: int, count: int, version: int) -> None:
        slots, table = self._groups.slice(first, count), self._groups.columns
        table["opened"][slots] = version
        table["oldest"][slots] = _NO_VERSION
        table["open"][slots] = True

    def is_open(self, group: int) -> bool:
        """Opened, and neither acknowledged by every consumer nor dropped."""
        return group in self._groups and bool(self._groups.get("open", group))

    def open_groups(self) -> Iterator[int]:
        """Ascending. O(groups since the oldest open one)."""
        return (group for group in range(self._groups.low, self._groups.end) if self.is_open(group))

    def version(self, group: int) -> int:
        """The version an open group was opened under."""
        return int(self._groups.get("opened", group))

    def tokens(self, group: int) -> list[int]:
        """Tokens of each row of an open group."""
        tokens: list[int] = self._groups.get("tokens", group).tolist()
        return tokens

    def rows(self, group: int) -> range:
        """Row ids of a group."""
        return range(group * self.group_size, (group + 1) * self.group_size)

    def rows_of(self, groups: Array) -> Array:
        """Row ids of groups (int64 [n]), int64 [n * group_size]."""
        if self.group_size == 1:
            return groups
        members: Array = groups[:, None] * self.group_size + np.arange(self.group_size)
        return members.reshape(-1)

    def units_of(self, rows: Array) -> Array:
        """Which storage unit has each column of rows that are remembered, int16 [n, columns]; 0 where none has."""
        units: Array = self._row_column("units")[self._row_slots(rows)]
        return units

    def at_unit(self, unit: int) -> Array:
        """Open groups with a column in a storage unit, ascending. O(groups since the oldest open one)."""
        groups = np.arange(self._groups.low, self._groups.end)
        there = (self._column_of("units", groups) == unit).any(axis=(1, 2))
        found: Array = groups[there & self._column_of("open", groups)]
        return found

    def tokens_of(self, rows: Array) -> Array:
        """Tokens of rows that are remembered, int32 [n]."""
        tokens: Array = self._row_column("tokens")[self._row_slots(rows)]
        return tokens

    def nbytes_of(self, rows: Array) -> Array:
        """Bytes of rows that are remembered, int64 [n]."""
        nbytes: Array = self._row_column("nbytes")[self._row_slots(rows)]
        return nbytes

    def is_written(self, row: int) -> bool:
        """Whether a row of an open group has a column."""
        group, member = divmod(row, self.group_size)
        return bool(self._groups.get("written", group)[member])

    def is_started(self, group: int) -> bool:
        """Whether every row of an open group has a column."""
        return bool(self._groups.get("written", group).all())

    def is_complete(self, group: int) -> bool:
        """Whether every row of an open group has every column."""
        written: list[int] = self._groups.get("written", group).tolist()
        return written.count(self._all) == self.group_size

    def stored_groups(self) -> Iterator[StoredGroup]:
        """Open groups of which every row is stored, ascending."""
        for group in self.open_groups():
            if self.is_started(group):
                yield StoredGroup(
                    group=group,
                    version=self.version(group),
                    oldest=int(self._groups.get("oldest", group)),
                    tokens=tuple(self.tokens(group)),
                )

    def _begin_at(self, low: int, end: int) -> None:
        """Groups ``low <= i < end`` are remembered, all zeros."""
        of_consumers, of_rows = self._groups.columns["state"], self._groups.columns["row_state"]
        self._groups = _table(
            self.group_size,
            columns=len(self._bits),
            consumers=of_consumers.shape[1],
            by_row=of_rows.shape[2],
            first=low,
        )
        self._groups.append(end - low)

    def place(self, rows: Array, columns: Collection[str], *, nbytes: Array, unit: int) -> Array:
        """Values of different rows (int64 [n]) that are :attr:`awaited`, and of ``nbytes`` (int64 [n]), are in ``unit``
        now. Returns int8 [n]: ``STORED``; ``DUPLICATE`` where some are in a unit already; ``LATE`` and ``UNKNOWN``
        where none is awaited."""
        added = self._mask(columns)
        outcome = self._refusals(rows, added)
        known = np.flatnonzero(outcome == DUPLICATE)
        slots, places = self._row_slots(rows[known]), self._places(columns)
        units = self._row_column("units")
        awaited = (units[slots[:, None], places] == 0).all(axis=1)
        awaited &= (self._row_column("written")[slots] & added) == added
        units[slots[awaited, None], places] = unit
        self._row_column("nbytes")[slots[awaited]] += nbytes[known[awaited]]
        self.nbytes += int(nbytes[known[awaited]].sum())
        self.awaited -= int(np.count_nonzero(awaited)) * len(places)
        outcome[outcome == STORED] = UNKNOWN
        outcome[known[awaited]] = STORED
        return outcome

    def displace(self, unit: int) -> None:
        """A storage unit is gone that had got values back: all values of their rows are :attr:`awaited` again. O(groups
        since the oldest open one)."""
        units, nbytes = self._row_column("units"), self._row_column("nbytes")
        there = (units == unit).any(axis=1)
        self.awaited += int(np.count_nonzero(units[there]))
        self.nbytes -= int(nbytes[there].sum())
        units[there] = nbytes[there] = 0

    def _awaited_of(self, groups: Array) -> int:
        written, units = self._column_of("written", groups), self._column_of("units", groups)
        masks = np.array(list(self._bits.values()))
        return int(np.count_nonzero((written[..., None] & masks != 0) & (units == 0)))

    def _leave(self, groups: Array) -> None:
        if self.awaited:
            self.awaited -= self._awaited_of(groups)
        slots = self._groups.slots(groups)
        self.buffered -= int(np.count_nonzero(self._groups.columns["written"][slots]))
        self.nbytes -= int(self._groups.columns["nbytes"][slots].sum())
        opened, reserved = self._groups.columns["open"], self._groups.columns["reserved"]
        opened[slots] = False
        low, end, base = self._groups.low, self._groups.end, self._groups.base
        while low < end and not opened[low - base] and not reserved[low - base]:
            low += 1
        self._groups.forget(low)

    def _refusals(self, rows: Array, added: int) -> Array:
        groups = rows // self.group_size
        outcome = np.zeros(len(rows), dtype=np.int8)
        known = (groups >= self._groups.low) & (groups < self._groups.end)
        if known.all():
            written = self._row_column("written")[self._row_slots(rows)]
            outcome[(written & added) != 0] = DUPLICATE
            outcome[~self._groups.columns["open"][self._groups.slots(groups)]] = LATE
        else:
            outcome[known] = self._refusals(rows[known], added)
            outcome[~known] = UNKNOWN
            outcome[(groups >= self._first_group) & (groups < self._groups.low)] = LATE
        return outcome

    def _mask(self, columns: Collection[str]) -> int:
        mask = 0
        for column in columns:
            mask |= self._bits[column]
        return mask

    def _places(self, columns: Collection[str]) -> list[int]:
        return [self._bits[column].bit_length() - 1 for column in columns]

    def _at(self, groups: Array) -> Any:
        """An index of groups in columns; of one group a number, with which numpy does in tens of nanoseconds what takes
        a microsecond with an array."""
        return groups.item() - self._groups.base if len(groups) == 1 else self._groups.slots(groups)

    def _row_slots(self, rows: Array) -> Array:
        return rows - self._groups.base * self.group_size

    def _row_column(self, name: str) -> Array:
        """A column with an entry per row, as one array of all rows."""
        return self._groups.members[name]

    def _column_of(self, name: str, groups: Array) -> Array:
        values: Array = self._groups.columns[name][self._groups.slots(groups)]
        return values
