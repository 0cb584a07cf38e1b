"""What a partition's columns look like, ready to be compared with what comes in."""

from __future__ import annotations

from math import prod
from typing import Any

import ml_dtypes
import numpy as np

from headrace.contract import Array, Column, Ragged
from headrace.dataplane.messages import ColumnSchema, PartitionSpec, Put
from headrace.errors import ContractError

_Kind = tuple[bool, np.dtype[Any], tuple[int, ...]]
"""Ragged, dtype, shape of one value or entry."""


class Schema:
    """ContractError for a dtype that does not exist."""

    def __init__(self, spec: PartitionSpec) -> None:
        self._spec = spec
        self._kinds: dict[str, _Kind] = {
            name: (column.ragged, _dtype(name, column.dtype), column.shape) for name, column in spec.columns.items()
        }

    def check(self, put: Put) -> Array:
        """int64 [rows]: the bytes of each. ContractError where a column is not what it should be."""
        if not put.columns:
            raise ContractError("a put without columns", fix=f"the columns are {self._say_all()}")
        count = len(put.rows) or len(next(iter(put.columns.values())))
        nbytes = np.zeros(count, dtype=np.int64)
        for name, column in put.columns.items():
            if self._kinds.get(name) != _kind(column):
                raise self._misfit(name, column)
            if len(column) != count:
                lengths = {name: len(column) for name, column in put.columns.items()}
                raise ContractError(
                    f"a put of {count} rows has columns of {lengths} rows", fix="give every row every column"
                )
            nbytes += _row_nbytes(column)
        return nbytes

    def tokens(self, put: Put) -> Array:
        """int64 [rows]: what a put adds to its rows' numbers of tokens."""
        measured = put.columns.get(self._spec.length_of)
        if isinstance(measured, Ragged):
            return measured.lengths
        return np.zeros(len(next(iter(put.columns.values()))), dtype=np.int64)

    def _misfit(self, name: str, column: Column) -> ContractError:
        known = self._spec.columns.get(name)
        given = _say(*_kind(column))
        return ContractError(
            f"column {name!r} of partition {self._spec.name!r} "
            + (f"is {_say_column(known)}, a put gave {given}" if known else f"does not exist, a put gave {given}"),
            fix=f"the columns are {self._say_all()}",
        )

    def _say_all(self) -> str:
        return ", ".join(f"{name}: {_say_column(column)}" for name, column in self._spec.columns.items())


def _dtype(column: str, name: str) -> np.dtype[Any]:
    try:
        return np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ContractError(
            f"column {column!r} has the dtype {name!r}, which does not exist", fix="name a dtype as numpy does: float32"
        ) from None


def _kind(column: Column) -> _Kind:
    if isinstance(column, Ragged):
        return True, column.values.dtype, column.values.shape[1:]
    return False, column.dtype, column.shape[1:]


def _row_nbytes(column: Column) -> Array | int:
    if isinstance(column, Ragged):
        return column.lengths * (column.values.dtype.itemsize * prod(column.values.shape[1:]))
    return column.dtype.itemsize * prod(column.shape[1:])


def _say_column(column: ColumnSchema) -> str:
    return f"{'ragged' if column.ragged else 'dense'} {column.dtype} {list(column.shape)}"


def _say(ragged: bool, dtype: np.dtype[Any], shape: tuple[int, ...]) -> str:
    return _say_column(ColumnSchema(dtype.name, shape, ragged))
