"""What callers hand in, as it is sent: what can mean one thing only is taken as that, the rest refused in words before
it leaves."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from math import inf
from pathlib import Path

import numpy as np

from headrace.contract import Array, Ragged, Repeated
from headrace.dataplane.contents import Value
from headrace.dataplane.schema import one_number
from headrace.errors import ContractError
from headrace.wire import DEFAULT_LIMITS
from headrace.wire.messages import MAX_SECONDS


def as_ids(ids: Array | Sequence[int], of: str) -> Array:
    """Ids of rows or groups as int64 [n]; arrays as they are, about which whoever gets them says more."""
    if isinstance(ids, np.ndarray):
        return ids
    try:
        found = np.array(list(ids))
    except (TypeError, ValueError):
        found = np.zeros((), dtype=object)
    if found.ndim != 1 or (len(found) and found.dtype.kind != "i"):
        raise ContractError(f"{of} that are {ids!r:.60}", fix="name them by their ids: int64 [n], or a list of int")
    return found.astype(np.int64)


def as_names(columns: Sequence[str], of: str) -> tuple[str, ...]:
    """Names of columns."""
    if isinstance(columns, str) or not isinstance(columns, Iterable):
        raise ContractError(f"{of} asks for the columns {columns!r}", fix='list their names: columns=["tokens"]')
    return tuple(columns)


def as_path(path: str | Path) -> Path:
    """Of a file."""
    if not isinstance(path, str | os.PathLike) or not str(path):
        raise ContractError(f"a snapshot at {path!r}", fix="name a file: DataPlane.snapshot('run/plane.snapshot')")
    return Path(path)


def check_columns(columns: Mapping[str, Value]) -> None:
    """ContractError for what is no columns."""
    if not isinstance(columns, Mapping):
        raise ContractError(f"a put of {type(columns).__name__}", fix="put columns by name: {'reward': rewards}")
    for name, column in columns.items():
        if not isinstance(column, np.ndarray | Ragged | Repeated):
            given = ", ".join(f"{name}: {type(column).__name__}" for name, column in columns.items())
            raise ContractError(f"a put gave {given}", fix="put numpy arrays, and Ragged for ragged columns")
        shared = column.values if isinstance(column, Repeated) else column
        values = shared.values if isinstance(shared, Ragged) else shared
        if not values.ndim:
            raise one_number(name)
        if values.dtype.kind in "OSUMm":
            raise ContractError(
                f"column {name!r} of a put has the dtype {values.dtype}: only numbers and bool are kept",
                fix="give the dtype that the schema names, for example np.array(values, dtype=np.float32)",
            )


def check_sizes(columns: Mapping[str, Value]) -> None:
    """ContractError for a column of which a put has more than can be sent."""
    for name, column in columns.items():
        shared = column.values if isinstance(column, Repeated) else column
        nbytes = (shared.values if isinstance(shared, Ragged) else shared).nbytes
        most = DEFAULT_LIMITS.frame_bytes
        if nbytes > most:
            raise ContractError(
                f"a put has {nbytes:,} bytes of column {name!r}; at most {most:,} are sent at once",
                fix="put fewer rows at once; cut values that are larger than that into several rows, or columns",
            )


def check_wait(seconds: float) -> None:
    """ContractError for what is no time to wait."""
    if not _is_number(seconds) or not 0 <= seconds <= MAX_SECONDS:
        raise ContractError(
            f"a wait of {seconds} seconds",
            fix=f"wait for a number of seconds from 0 to {MAX_SECONDS:,}: nothing waits for ever",
        )


def check_held_for(seconds: float) -> None:
    """ContractError for what is no time to hold a lease."""
    if not _is_number(seconds) or not 0 < seconds < inf:
        raise ContractError(f"a lease held for {seconds} seconds", fix="hold it for a number of seconds above 0")


def _is_number(value: object) -> bool:
    return isinstance(value, int | float | np.number) and not isinstance(value, np.complexfloating)
