"""Columns of rows that several storage units have, asked for in as few words as there are units that differ."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from headrace.contract import Array, Batch, Column, Repeated


class Part(NamedTuple):
    """What one unit is asked for. ``at``: int64, places of its rows among all that are wanted."""

    unit: int
    columns: tuple[str, ...]
    at: Array


def sole_unit(units: Array) -> int:
    """The unit that has every value; 0 where there is none. ``units``: int16 [rows, columns]."""
    said = units.tobytes()  # for a few rows far cheaper than to compare numbers
    return units.item(0) if said and said == said[: units.itemsize] * units.size else 0


def parts(units: Array, columns: Sequence[str]) -> Iterator[Part]:
    """``units``: int16 [rows, columns], which unit has each value."""
    for unit in np.unique(units).tolist():
        there = units == unit
        patterns: dict[bytes, list[str]] = {}
        for place, column in enumerate(columns):
            if there[:, place].any():
                patterns.setdefault(there[:, place].tobytes(), []).append(column)
        for pattern, names in patterns.items():
            yield Part(unit, tuple(names), np.flatnonzero(np.frombuffer(pattern, dtype=bool)))


def join(rows: Array, columns: Sequence[str], found: Sequence[tuple[Part, Batch]]) -> Batch:
    """The columns of ``rows``, in this order."""
    joined: dict[str, Column] = {}
    repeated: dict[str, Repeated] = {}
    for column in columns:
        pieces = [(part.at, batch.select([column])) for part, batch in found if column in part.columns]
        whole = pieces[0][1]
        if len(pieces) > 1:
            at = np.concatenate([places for places, _ in pieces])
            whole = Batch.concatenate([piece for _, piece in pieces]).take(np.argsort(at))
        joined |= whole.columns
        repeated |= whole.repeated
    return Batch(rows=rows, columns=joined, repeated=repeated)
