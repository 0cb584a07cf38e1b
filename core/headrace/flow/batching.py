"""What a batch is made of, and how it is cut: whole groups, oldest version first.

Pure functions of their arguments. Invariant: cutting neither loses nor repeats a row, never splits a group over
mini-batches, and depends on ids and lengths alone.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.contract import Array


def oldest_first(ready: Mapping[int, int], *, groups: int) -> dict[int, int] | None:
    """How many groups of each version the next batch takes; None while fewer than ``groups`` are ready."""
    chosen: dict[int, int] = {}
    missing = groups
    for version in sorted(ready):
        if missing and ready[version]:
            chosen[version] = min(missing, ready[version])
            missing -= chosen[version]
    return None if missing else chosen


def mini_batches(groups: Array, *, count: int) -> list[Array]:
    """Cut a batch into ``count`` mini-batches of whole groups, in id order.

    ``groups``: int64 [rows], the group of each row. Returns the positions of each mini-batch's rows, int64. Group
    counts differ by at most one, larger ones first. ValueError when there are fewer groups than mini-batches.
    """
    order = np.argsort(groups, kind="stable")
    _, starts = np.unique(groups[order], return_index=True)
    if not 1 <= count <= len(starts):
        raise ValueError(f"{len(starts)} groups cannot fill {count} mini-batches: no group is split and none is empty")
    cuts = [starts[part[0]] for part in np.array_split(np.arange(len(starts)), count)]
    return np.split(order, cuts[1:])


def micro_batches(lengths: Array, *, token_budget: int, rows: Array | None = None) -> list[Array]:
    """Cut rows into runs of at most ``token_budget`` tokens, in the order given.

    ``lengths``: tokens of each row; ``rows``: the positions to cut (default: all). A row longer than the budget is
    alone in its micro-batch. Returns positions, int64.
    """
    if token_budget < 1:
        raise ValueError(f"a token budget is at least 1, got {token_budget}")
    order = np.arange(len(lengths)) if rows is None else np.asarray(rows, dtype=np.int64)
    cuts: list[int] = []
    held = 0
    for place, length in enumerate(lengths[order].tolist()):
        if place and held + length > token_budget:
            cuts.append(place)
            held = 0
        held += length
    return np.split(order, cuts) if len(order) else []
