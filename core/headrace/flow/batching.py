"""What a batch is made of, and how it is cut: whole groups, oldest version first.

Pure functions of their arguments. Invariant: cutting neither loses nor repeats a row, and depends on ids and lengths
alone.
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
    """Cut a batch into ``count`` mini-batches, each with an equal share of every group's rows.

    Advantages are those of whole groups by then, so that a step over some members of every prompt is as right as one
    over all members of some prompts, and it sees four times as many prompts where there are four mini-batches.
    ``groups``: int64 [rows], the group of each row. Returns the positions of each mini-batch's rows, int64, in id
    order. Rows differ by at most one, also within a group. ValueError when there are fewer rows than mini-batches.
    """
    if not 1 <= count <= len(groups):
        raise ValueError(f"{len(groups)} rows cannot fill {count} mini-batches: none is empty")
    order = np.argsort(groups, kind="stable")
    return [order[first::count] for first in range(count)]


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
