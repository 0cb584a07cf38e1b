"""Writes out the rows of a step whose loss or gradient was not finite, for a person to look at, and
ends a run that takes no step any more.

Invariant: at most :data:`MOST` files per run: a run that goes wrong a thousand times fills no disk.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headrace.contract import Array, Batch, Ragged
from headrace.errors import RunError

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


def nothing_was_trained(batches: int, rows: Path) -> RunError:
    """What ends a run after so many ``batches`` in a row; ``rows``: the folder of :func:`dump`, which there is only
    when a loss or gradient was not finite."""
    untaken = f"no optimiser step of {batches} batches in a row was taken"
    if not rows.is_dir():
        return RunError(
            f"{untaken}: there was no token to train",
            origin="node trainer: every loss and gradient was finite",
            fix="look for answers that are all empty: prompts that fill the context make them; or, with "
            "mask_truncated of the algorithm, that are all cut off at max_new_tokens",
        )
    return RunError(
        f"{untaken}: loss or gradient was not finite",
        origin=f"node trainer; rows of what was not finite are in {rows}",
        fix="lower the learning rate, and look for rewards or log-probs that are not finite in those rows",
    )
