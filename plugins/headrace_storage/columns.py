"""The two kinds of column, one value per row or one array per row, and how they are kept in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from headrace.contract import Array, Batch, Column, Ragged
from headrace.errors import ContractError

Kind = tuple[str, np.dtype[Any], tuple[int, ...]]
"""Layout, dtype and shape of one value."""

_FEWEST_SLOTS = 64


class DenseColumn:
    """Values in slots of one array that grows and shrinks by doubling and halving; a freed slot is used again."""

    def __init__(self, like: Array) -> None:
        self._values = np.empty((_FEWEST_SLOTS, *like.shape[1:]), like.dtype)
        self._slots: dict[int, int] = {}
        self._free = list(range(_FEWEST_SLOTS))

    def __len__(self) -> int:
        return len(self._slots)

    @property
    def kind(self) -> Kind:
        """What a column must be to fit."""
        return kind_of(self._values)

    @property
    def nbytes(self) -> int:
        """Of the rows' values."""
        return len(self._slots) * (self._values.nbytes // len(self._values))

    def put(self, rows: Sequence[int], column: Array) -> None:
        """Store ``column[i]`` for ``rows[i]``."""
        fresh = [row for row in rows if row not in self._slots]
        if len(fresh) > len(self._free):
            self._resize(len(self._slots) + len(fresh))
        for row in fresh:
            self._slots[row] = self._free.pop()
        self._values[[self._slots[row] for row in rows]] = column

    def get(self, rows: Sequence[int]) -> Array:
        """A copy, in the order of ``rows``. KeyError with the first absent row."""
        chosen: Array = self._values[np.fromiter((self._slots[row] for row in rows), np.int64, len(rows))]
        return chosen

    def value(self, row: int) -> Array:
        """A view. KeyError for an absent row."""
        value: Array = self._values[self._slots[row]]
        return value

    def delete(self, rows: Sequence[int]) -> None:
        """Forget these rows; those without a value are skipped."""
        self._free += [self._slots.pop(row) for row in rows if row in self._slots]
        if len(self._values) > max(_FEWEST_SLOTS, 4 * len(self._slots)):
            self._resize(len(self._slots))

    def _resize(self, needed: int) -> None:
        """Move the rows to the front of an array with room for twice as many as needed."""
        slots = max(_FEWEST_SLOTS, 2 * needed)
        values = np.empty((slots, *self._values.shape[1:]), self._values.dtype)
        values[: len(self._slots)] = self._values[list(self._slots.values())]
        self._values = values
        self._slots = {row: slot for slot, row in enumerate(self._slots)}
        self._free = list(range(len(self._slots), slots))


class RaggedColumn:
    """An array of its own per row."""

    def __init__(self, like: Ragged) -> None:
        self._none = np.empty((0, *like.values.shape[1:]), like.values.dtype)
        self._arrays: dict[int, Array] = {}
        self._nbytes = 0

    def __len__(self) -> int:
        return len(self._arrays)

    @property
    def kind(self) -> Kind:
        """What a column must be to fit."""
        return "ragged", self._none.dtype, self._none.shape[1:]

    @property
    def nbytes(self) -> int:
        """Of the rows' values."""
        return self._nbytes

    def put(self, rows: Sequence[int], column: Ragged) -> None:
        """Store a copy of ``column[i]`` for ``rows[i]``."""
        self.delete(rows)
        bounds = column.offsets.tolist()
        for row, start, stop in zip(rows, bounds[:-1], bounds[1:], strict=True):
            self._arrays[row] = column.values[start:stop].copy()
        self._nbytes += column.values.nbytes

    def get(self, rows: Sequence[int]) -> Ragged:
        """A copy, in the order of ``rows``. KeyError with the first absent row."""
        arrays = [self._arrays[row] for row in rows]
        return Ragged.from_arrays(arrays) if arrays else Ragged(self._none, np.zeros(1, np.int64))

    def value(self, row: int) -> Array:
        """KeyError for an absent row."""
        return self._arrays[row]

    def delete(self, rows: Sequence[int]) -> None:
        """Forget these rows; those without a value are skipped."""
        for row in rows:
            array = self._arrays.pop(row, None)
            if array is not None:
                self._nbytes -= array.nbytes


def kind_of(column: Column) -> Kind:
    """What all rows of a column have in common."""
    values, layout = (column.values, "ragged") if isinstance(column, Ragged) else (column, "dense")
    return layout, values.dtype, values.shape[1:]


def nbytes_of(column: Column) -> int:
    """Of all rows."""
    return int(column.values.nbytes if isinstance(column, Ragged) else column.nbytes)


def say(kind: Kind) -> str:
    """For people: ``dense float32 []``."""
    layout, dtype, shape = kind
    return f"{layout} {dtype.name} {list(shape)}"


class _Known(Protocol):
    @property
    def kind(self) -> Kind: ...


def check(batch: Batch, known: Mapping[str, _Known]) -> list[int]:
    """The rows of what is to be put. ContractError when it names one twice, or a column is not as it is known."""
    rows: list[int] = batch.rows.tolist()
    if len(set(rows)) != len(rows):
        raise ContractError("a put names a row twice", fix="put every row once")
    for name, column in batch.columns.items():
        if name in known and known[name].kind != kind_of(column):
            raise ContractError(
                f"column {name!r} is {say(known[name].kind)}, a put gave {say(kind_of(column))}",
                fix="give every row of a column the same dtype and shape",
            )
    return rows
