"""What a partition's columns look like, ready to be compared with what comes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from math import prod
from numbers import Integral
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from headrace.contract import Array, Ragged, Repeated
from headrace.dataplane.contents import Value
from headrace.dataplane.messages import ColumnSchema, Note, PartitionSpec, Put
from headrace.errors import ContractError
from headrace.flow.group_table import MOST_COLUMNS
from headrace.wire import DEFAULT_LIMITS
from headrace.wire.arrays import dtype_name

_NO_VERSION = np.iinfo(np.int64).max
MOST_ROWS = 1 << 16
"""Of a group. A ledger has arrays with a place for each row of each group."""
MOST_CHARACTERS = 100
"""Of the name of a put, which the ledger remembers."""


class _Kind(NamedTuple):
    like: tuple[bool, np.dtype[Any], tuple[int, ...]]
    """Whether it is ragged; dtype and shape of one value or entry."""
    nbytes: int
    """Of one value or entry."""
    by_content: bool


class Schema:
    """ContractError for a dtype that does not exist. ``made``: see :class:`Described`."""

    def __init__(self, spec: PartitionSpec, *, made: int = 0) -> None:
        self.made = made
        self._spec = spec
        self._kinds = {name: _kind_of(name, column) for name, column in spec.columns.items()}

    @property
    def group_size(self) -> int:
        """Rows of a group."""
        return self._spec.group_size

    def check(self, put: Put) -> tuple[Note, int]:
        """What a unit tells of a put, and its bytes. ContractError where a column is not what it should be, or the
        put is for another partition of the name."""
        check_made(put.partition, put.made, self.made)
        if not put.columns:
            raise ContractError("a put without columns", fix=f"the columns are {self._say_all()}")
        if put.once:
            _check_name(put)
        if put.rows is None:
            count = _count(put.columns)
        else:
            _check_rows(put.rows)
            count = len(put.rows)
        if not 0 <= put.version < _NO_VERSION:
            raise ContractError(f"a put of policy version {put.version}", fix="versions are counted from 0 on")
        dense, total, ragged, tokens = 0, 0, None, None
        for name, column in put.columns.items():
            kind = self._kinds.get(name)
            shared = column.values if isinstance(column, Repeated) else column
            values = shared.values if isinstance(shared, Ragged) else shared
            like = values is not shared, values.dtype, values.shape[1:]
            if kind is None or like != kind.like or (shared is not column) != kind.by_content:
                raise self._misfit(name, column)
            try:
                uneven = len(column) != count
            except TypeError:
                raise one_number(name) from None
            if uneven:
                raise _uneven(put, count)
            total += values.nbytes
            if isinstance(column, Repeated):
                ragged = _sizes(column, kind.nbytes) + (0 if ragged is None else ragged)
            elif isinstance(column, Ragged):
                lengths = column.lengths
                ragged = lengths * kind.nbytes + (0 if ragged is None else ragged)
                tokens = lengths if name == self._spec.length_of else tokens
            else:
                dense += kind.nbytes
        alike = _alike(count, dense)
        note = Note(
            put.partition,
            put.rows,
            count,
            tuple(put.columns),
            alike if ragged is None else ragged + alike,
            _alike(count, 0) if tokens is None else tokens,
            put.version,
            put.tags,
            put.producer,
            self.made,
            put.once,
        )
        return note, total

    def _misfit(self, name: str, column: Value) -> ContractError:
        known = self._spec.columns.get(name)
        shared = column.values if isinstance(column, Repeated) else column
        values = shared.values if isinstance(shared, Ragged) else shared
        given = _say(isinstance(shared, Ragged), values.dtype, values.shape[1:], shared is not column)
        fix = f"the columns are {self._say_all()}"
        if known and known.ragged and isinstance(shared, Ragged) and values.dtype != known.dtype:
            fix = f'say the dtype, which empty rows do not have: Ragged.from_arrays(rows, dtype="{known.dtype}")'
        return ContractError(
            f"column {name!r} of partition {self._spec.name!r} "
            + (f"is {_say_column(known)}, a put gave {given}" if known else f"does not exist, a put gave {given}"),
            fix=fix,
        )

    def _say_all(self) -> str:
        return ", ".join(f"{name}: {_say_column(column)}" for name, column in self._spec.columns.items())


def _sizes(column: Repeated, nbytes: int) -> Array:
    """Bytes of each row's value, int64 [n], whoever else has it. ``nbytes``: of one entry."""
    values = column.values
    sizes: Array = values.lengths * nbytes if isinstance(values, Ragged) else np.full(len(values), nbytes)
    return sizes[column.places]


@lru_cache(maxsize=1024)
def _alike(count: int, number: int) -> Array:
    """int64 [count], read-only. Kept: making a small array costs more than most of a small put."""
    alike = np.full(count, number, dtype=np.int64)
    alike.flags.writeable = False
    return alike


def check_made(partition: str, wanted: int, made: int) -> None:
    """ContractError for whoever means another partition of the name. ``wanted``: 0 for any."""
    if wanted not in (0, made):
        raise ContractError(
            f"partition {partition!r} is another by now: it was removed, or its ledger was started again",
            fix="ask the data plane for the partition again; rows and leases of before are not of this one",
        )


def _dtype(column: str, name: str) -> np.dtype[Any]:
    if not isinstance(name, str):  # from somebody whom no type checker told
        raise ContractError(
            f"column {column!r} has the dtype {name!r}, which is not named",
            fix=f"name it as numpy does: {_dtype_named(name)}",
        )
    try:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
    except TypeError:
        raise ContractError(
            f"column {column!r} has the dtype {name!r}, which does not exist", fix="name a dtype as numpy does: float32"
        ) from None
    try:
        dtype_name(dtype)
    except TypeError as error:
        raise ContractError(f"column {column!r}: {error}", fix="name a dtype of numbers or bool: float32") from None
    return dtype


def _dtype_named(dtype: Any) -> str:
    try:
        return repr(np.dtype(dtype).name)
    except TypeError:
        return "'float32'"


def _kind_of(name: str, column: ColumnSchema) -> _Kind:
    dtype = _dtype(name, column.dtype)
    if min(column.shape, default=0) < 0:
        raise ContractError(
            f"column {name!r} has values of shape {list(column.shape)}",
            fix="give the length of each dimension; only the first of a ragged column differs from row to row",
        )
    nbytes = dtype.itemsize * prod(map(int, column.shape))
    if nbytes > DEFAULT_LIMITS.frame_bytes:
        raise ContractError(
            f"column {name!r} has values of shape {list(column.shape)}: {nbytes:,} bytes each",
            fix=f"an array of at most {DEFAULT_LIMITS.frame_bytes:,} bytes travels: cut the values into smaller ones",
        )
    return _Kind((column.ragged, dtype, column.shape), nbytes, column.by_content)


def _check_name(put: Put) -> None:
    if put.rows is not None:
        raise ContractError(
            f"a put of rows that have ids is named {put.once!r}",
            fix="name puts of new rows only: what is put again of others is not kept twice",
        )
    if len(put.once) > MOST_CHARACTERS:
        raise ContractError(
            f"the name of a put has {len(put.once)} characters", fix=f"give it at most {MOST_CHARACTERS}"
        )


def _check_rows(rows: Array) -> None:
    if rows.ndim != 1 or rows.dtype != np.int64:
        raise ContractError(f"a put of rows that are {rows.dtype} {list(rows.shape)}", fix="name them as int64 [n]")
    in_order = np.sort(rows)
    twice = in_order[1:][in_order[1:] == in_order[:-1]]
    if len(twice):
        raise ContractError(f"a put names row {twice[0]} twice", fix="put every row once")


def _count(columns: Mapping[str, Value]) -> int:
    """Of new rows."""
    name, column = next(iter(columns.items()))
    try:
        return len(column)
    except TypeError:
        raise one_number(name) from None


def one_number(name: str) -> ContractError:
    """Of a column that is an array without dimensions."""
    return ContractError(f"column {name!r} of a put is one number", fix="put an array with an entry for each row")


def _uneven(put: Put, count: int) -> ContractError:
    lengths = {name: len(column) for name, column in put.columns.items()}
    return ContractError(f"a put of {count} rows has columns of {lengths} rows", fix="give every row every column")


def _say_column(column: ColumnSchema) -> str:
    kind = f"{'ragged' if column.ragged else 'dense'} {column.dtype} {list(column.shape)}"
    return f"{kind} by content" if column.by_content else kind


def _say(ragged: bool, dtype: np.dtype[Any], shape: tuple[int, ...], by_content: bool) -> str:
    order = "" if dtype.isnative else " in another byte order than this machine's"
    return _say_column(ColumnSchema(dtype.name + order, shape, ragged, by_content))


def check_spec(spec: PartitionSpec) -> None:
    """ContractError for a partition that cannot be."""
    _check_types(spec)
    Schema(spec)
    if len(spec.columns) > MOST_COLUMNS:
        raise ContractError(
            f"{len(spec.columns)} columns of partition {spec.name!r}; a ledger keeps at most {MOST_COLUMNS}",
            fix="put what is read together into one column, or what another stage needs into another partition",
        )
    for consumer, reads in spec.consumers.items():
        _check_columns(spec, f"consumer {consumer!r} of partition {spec.name!r} reads", reads)
    for consumer, adds in spec.writes.items():
        _check_columns(spec, f"consumer {consumer!r} of partition {spec.name!r} writes", adds)
    if strangers := sorted({*spec.writes, *spec.by_row} - spec.consumers.keys()):
        raise ContractError(
            f"writes or by_row of partition {spec.name!r} names {', '.join(strangers)}",
            fix=f"name its consumers: {', '.join(spec.consumers)}",
        )
    length_of = spec.columns.get(spec.length_of)
    if spec.length_of and not (length_of and length_of.ragged and not length_of.by_content):
        raise ContractError(
            f"length_of = {spec.length_of!r} is no ragged column of partition {spec.name!r}, or one by content",
            fix="name the ragged column whose length is the number of tokens, and keep it row by row",
        )
    if any("/" in column for column in spec.columns):
        raise ContractError(
            f"columns {', '.join(spec.columns)} of partition {spec.name!r}", fix="name columns without a slash"
        )
    if not 1 <= spec.group_size <= MOST_ROWS:
        raise ContractError(
            f"group_size = {spec.group_size} of partition {spec.name!r}", fix=f"it is from 1 to {MOST_ROWS:,}"
        )


def _check_types(spec: PartitionSpec) -> None:
    """As somebody may write it whom no type checker told."""
    if not isinstance(spec, PartitionSpec):
        raise ContractError(f"a partition described by {type(spec).__name__}", fix="describe it by a PartitionSpec")
    if not isinstance(spec.name, str) or not spec.name:
        raise ContractError(f"a partition named {spec.name!r}", fix="name it by a text that is not empty")
    of = f"of partition {spec.name!r}"
    for what, named in (("columns", spec.columns), ("consumers", spec.consumers), ("writes", spec.writes)):
        if not isinstance(named, Mapping) or not all(isinstance(name, str) and name for name in named):
            raise ContractError(f"{what} {of} are {named!r:.60}", fix=f"give {what} by their names, in a dict")
    for name, column in spec.columns.items():
        if not isinstance(column, ColumnSchema):
            raise ContractError(f"column {name!r} {of} is {column!r}", fix='describe it: ColumnSchema("float32")')
        if not isinstance(column.shape, tuple | list) or not all(isinstance(side, Integral) for side in column.shape):
            raise ContractError(f"column {name!r} {of} has the shape {column.shape!r}", fix="give a tuple of int: (3,)")
        for what, said in (("ragged", column.ragged), ("by_content", column.by_content)):
            if not isinstance(said, bool):
                raise ContractError(f"{what} of column {name!r} {of} is {said!r}", fix="say True or False")
    lists = {f"what consumer {name!r} {of} reads": reads for name, reads in spec.consumers.items()}
    lists |= {f"what consumer {name!r} {of} writes": adds for name, adds in spec.writes.items()}
    for what, names in {**lists, f"by_row {of}": spec.by_row}.items():
        if not isinstance(names, tuple | list) or not all(isinstance(name, str) for name in names):
            raise ContractError(f"{what} is {names!r}", fix='give a tuple of names, of one too: ("tokens",)')
    if not isinstance(spec.length_of, str):
        raise ContractError(f"length_of {of} is {spec.length_of!r}", fix='name a ragged column, or say ""')
    if not isinstance(spec.group_size, int):
        raise ContractError(f"group_size {of} is {spec.group_size!r}", fix="give a whole number, at least 1")


def _check_columns(spec: PartitionSpec, who: str, named: Sequence[str]) -> None:
    strangers = [column for column in named if column not in spec.columns]
    if strangers or not named:
        raise ContractError(f"{who} {strangers or 'no column'}", fix=f"the columns are {', '.join(spec.columns)}")
