"""Equal shares of work: numbers divided over ranks so that sums are close and counts are equal.

Karmarkar and Karp's largest differencing method (1982), for many ways and equal counts: items are sorted and cut into
tuples of one item per rank; the two tuples with the largest differences between their sums are merged, largest sum of
one with smallest of the other, until one is left. That puts one item of every tuple into each share, which leaves a
share with one very long item too heavy; so items are then exchanged between the heaviest share and the lightest while
that brings them closer.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.int64]
_Share = tuple[int, list[int]]
"""Sum, and positions of items."""


def balanced_shares(sizes: Sequence[int], ranks: int) -> list[Array]:
    """Positions of every rank's items, int64, ascending. Counts differ by at most one. The same answer for the same
    arguments. ValueError for ``ranks`` below 1."""
    if ranks < 1:
        raise ValueError(f"shares for {ranks} ranks; at least 1 is needed")
    order = sorted(range(len(sizes)), key=lambda item: (-sizes[item], item))
    heap: list[tuple[int, int, list[_Share]]] = []
    for start in range(0, len(order), ranks):
        shares: list[_Share] = [(sizes[item], [item]) for item in order[start : start + ranks]]
        shares += [(0, [])] * (ranks - len(shares))
        heap.append((-_spread(shares), start, shares))
    heapq.heapify(heap)
    while len(heap) > 1:
        _, tie, widest = heapq.heappop(heap)
        _, _, second = heapq.heappop(heap)
        merged = _merge(widest, second)
        heapq.heappush(heap, (-_spread(merged), tie, merged))
    shares = heap[0][2] if heap else [(0, [])] * ranks
    positions = [np.array(items, dtype=np.int64) for _, items in shares]
    _exchange(positions, np.asarray(sizes, dtype=np.int64))
    return [np.sort(share) for share in positions]


def most_within(sizes: Sequence[int], budget: int, ranks: int = 1) -> int:
    """How many of the first ``sizes``, at least one a rank, can be shared so that no rank has more than ``budget``. All
    when there are fewer than ranks."""
    total = np.cumsum(sizes)
    low = min(ranks, len(sizes))
    high = max(low, int(np.searchsorted(total, budget * ranks, side="right")))
    if ranks == 1:
        return high
    while low < high:
        middle = (low + high + 1) // 2
        shares = balanced_shares(sizes[:middle], ranks)
        if max(sum(sizes[item] for item in share.tolist()) for share in shares) <= budget:
            low = middle
        else:
            high = middle - 1
    return low


def _exchange(shares: list[Array], sizes: Array) -> None:
    sums = [int(sizes[share].sum()) for share in shares]
    while True:
        heavy, light = sums.index(max(sums)), sums.index(min(sums))
        gap = sums[heavy] - sums[light]
        moved = sizes[shares[heavy]][:, None] - sizes[shares[light]][None, :]
        useful = np.where((moved > 0) & (moved < gap), abs(2 * moved - gap), gap)
        if not useful.size or useful.min() >= gap:
            return
        one, other = np.unravel_index(int(useful.argmin()), useful.shape)
        shares[heavy][one], shares[light][other] = shares[light][other], shares[heavy][one]
        sums[heavy] -= int(moved[one, other])
        sums[light] += int(moved[one, other])


def _spread(shares: list[_Share]) -> int:
    return shares[0][0] - shares[-1][0]


def _merge(one: list[_Share], other: list[_Share]) -> list[_Share]:
    """Both are sorted, largest sum first; so is the result."""
    joined = [(left + right, items + more) for (left, items), (right, more) in zip(one, reversed(other), strict=True)]
    return sorted(joined, key=lambda share: -share[0])
