"""The two kinds of column: one value per row, or one array per row."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any, Protocol

import numpy as np

from headrace.contract import Array, Batch, Column, Ragged
from headrace.errors import ContractError

Kind = tuple[str, np.dtype[Any], tuple[int, ...]]
"""Layout, dtype and shape of one value."""


def kind_of(column: Column) -> Kind:
    """What all rows of a column have in common."""
    values, layout = (column.values, "ragged") if isinstance(column, Ragged) else (column, "dense")
    return layout, values.dtype, values.shape[1:]


def entry_nbytes(kind: Kind) -> int:
    """Of one value, or of one entry of a ragged column."""
    _, dtype, shape = kind
    return int(dtype.itemsize * prod(shape))


def bounds(column: Column) -> list[int]:
    """Where each row's bytes begin in those of the column, and where the last one's end."""
    size = entry_nbytes(kind_of(column))
    if isinstance(column, Ragged):
        ragged: list[int] = (column.offsets * size).tolist()
        return ragged
    return [row * size for row in range(len(column) + 1)]


def nbytes_of(column: Column) -> int:
    """Of all rows."""
    return int(column.values.nbytes if isinstance(column, Ragged) else column.nbytes)


def nothing(kind: Kind) -> Column:
    """A column without rows."""
    layout, dtype, shape = kind
    none: Array = np.empty((0, *shape), dtype)
    return Ragged(none, np.zeros(1, np.int64)) if layout == "ragged" else none


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
        kind, there = kind_of(column), known.get(name)
        if there is not None and there.kind != kind:
            raise ContractError(
                f"column {name!r} is {say(there.kind)}, a put gave {say(kind)}",
                fix="give every row of a column the same dtype and shape",
            )
        if kind[0] == "ragged" and not entry_nbytes(kind):
            raise ContractError(
                f"the entries of column {name!r} have no bytes: {say(kind)}", fix="leave the column out"
            )
    return rows
