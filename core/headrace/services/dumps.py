"""Writes out the rows of a step whose loss or gradient was not finite, for a person to look at.

Invariant: at most :data:`MOST` files per run: a run that goes wrong a thousand times fills no disk.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.contract import Array, Batch, Ragged

MOST = 8


def dump(batch: Batch, directory: Path, name: str) -> str:
    """``directory/name.npz``: ``rows``, every dense column under its name, every ragged one as ``NAME.values`` and
    ``NAME.offsets``. Returns the path, "" when there are enough files already."""
    directory.mkdir(parents=True, exist_ok=True)
    if len(list(directory.glob("*.npz"))) >= MOST:
        return ""
    arrays: dict[str, Array] = {"rows": batch.rows}
    for column, values in batch.columns.items():
        if isinstance(values, Ragged):
            arrays |= {f"{column}.values": values.values, f"{column}.offsets": values.offsets}
        else:
            arrays[column] = values
    path = directory / f"{name}.npz"
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]  # names of columns, not of its own parameters
    return str(path)
