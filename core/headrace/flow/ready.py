"""Groups that a consumer could be given, oldest version first; within a version, those that were ready first.

Rings of numbers, no Python object per group. Invariant: taking ``n`` costs O(n + those dropped meanwhile + log
versions), however many groups wait.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator

import numpy as np

from headrace.contract import Array

_FEWEST = 16


class Ring:
    """A queue of int64 that takes and gives whole arrays, at both ends."""

    def __init__(self) -> None:
        self._items = np.empty(_FEWEST, dtype=np.int64)
        self._start = self._length = 0

    def __len__(self) -> int:
        return self._length

    def append(self, items: Array) -> None:
        """Add at the back."""
        self._fit(self._length + len(items))
        self._write((self._start + self._length) % len(self._items), items)
        self._length += len(items)

    def push(self, item: int) -> None:
        """Add one at the back."""
        capacity = len(self._items)
        if self._length == capacity:
            self._fit(capacity + 1)
            capacity = len(self._items)
        self._items[(self._start + self._length) % capacity] = item
        self._length += 1

    def prepend(self, items: Array) -> None:
        """Add at the front, ``items[0]`` foremost."""
        self._fit(self._length + len(items))
        self._start = (self._start - len(items)) % len(self._items)
        self._write(self._start, items)
        self._length += len(items)

    def take(self, count: int) -> Array:
        """Remove up to ``count`` from the front."""
        count = min(count, self._length)
        taken = self._read(count)
        self._start = (self._start + count) % len(self._items)
        self._length -= count
        if len(self._items) > _FEWEST and 4 * self._length <= len(self._items):
            self._move(max(_FEWEST, len(self._items) // 2))
        return taken

    def copy(self) -> Array:
        """All of them."""
        return self._read(self._length)

    def _write(self, start: int, items: Array) -> None:
        before_end = len(self._items) - start
        self._items[start : start + len(items)] = items[:before_end]
        if len(items) > before_end:
            self._items[: len(items) - before_end] = items[before_end:]

    def _read(self, count: int) -> Array:
        """A copy of the first ``count``."""
        first = self._items[self._start : self._start + count]
        if len(first) == count:
            return first.copy()
        return np.concatenate([first, self._items[: count - len(first)]])

    def _fit(self, length: int) -> None:
        if length > len(self._items):
            self._move(max(length, 2 * len(self._items)))

    def _move(self, capacity: int) -> None:
        items = np.empty(capacity, dtype=np.int64)
        items[: self._length] = self._read(self._length)
        self._items, self._start = items, 0


class ReadyGroups:
    """``is_ready``: which of some groups (int64 [n]) still are, bool [n]; a group that was dropped is left in its ring
    until it comes to the front."""

    def __init__(self, is_ready: Callable[[Array], Array]) -> None:
        self._is_ready = is_ready
        self._rings: dict[int, Ring] = {}
        self._counts: dict[int, int] = {}
        self._versions: list[int] = []
        """Ascending: those of ``_counts``."""
        self.total = 0
        self.ever = 0
        """How many were added."""

    def by_version(self) -> dict[int, int]:
        """How many groups; a copy."""
        return dict(self._counts)

    def count(self, *, min_version: int | None = None) -> int:
        """How many groups there are that are not older than ``min_version``."""
        if min_version is None or not self._versions or self._versions[0] >= min_version:
            return self.total
        return sum(self._counts[version] for version in self._from(min_version))

    def add(self, groups: Array, versions: Array, *, again: bool = False) -> None:
        """These became ready. ``again``: they were taken and come back, to the front."""
        for version, members in _by_version(groups, versions):
            self.add_of(version, members, again=again)

    def add_of(self, version: int, groups: Array, *, again: bool = False) -> None:
        """:meth:`add` of groups of one version."""
        ring = self._ring(version)
        (ring.prepend if again else ring.append)(groups)
        self.ever += len(groups)
        self._change(version, len(groups))

    def add_range(self, version: int, first: int, count: int) -> None:
        """:meth:`add` of groups that follow one another."""
        if count == 1:
            self.push(version, first)
        else:
            self.add_of(version, np.arange(first, first + count))

    def push(self, version: int, group: int) -> None:
        """:meth:`add` of one group."""
        self._ring(version).push(group)
        self.ever += 1
        self.total += 1
        self._counts[version] += 1

    def discard(self, version: int) -> None:
        """One group of ``version`` is not ready any more."""
        self._change(version, -1)

    def take(self, count: int, *, min_version: int | None = None) -> Array:
        """Up to ``count`` groups leave, int64. ValueError for less than none."""
        if count < 0:
            raise ValueError(f"{count} groups cannot be taken")
        found: list[Array] = []
        for version in self._from(min_version):
            while count and version in self._rings:
                ring = self._rings[version]
                whole = len(ring) == self._counts[version]
                taken = ring.take(count)
                if not whole:  # some were dropped
                    taken = taken[self._is_ready(taken)]
                found.append(taken)
                count -= len(taken)
                self._change(version, -len(taken))
            if not count:
                break
        if len(found) == 1:
            return found[0]
        return np.concatenate(found) if found else np.empty(0, dtype=np.int64)

    def all(self, *, min_version: int | None = None) -> Array:
        """Every group, int64, in the order in which they would be taken. O(groups that are ready or were dropped)."""
        found = [np.empty(0, dtype=np.int64)]
        found += [self._rings[version].copy() for version in self._from(min_version)]
        groups = np.concatenate(found)
        ready: Array = groups[self._is_ready(groups)]
        return ready

    def remove(self, groups: Array, versions: Array) -> None:
        """These leave, which are all ready and different. O(groups of their versions)."""
        for version, members in _by_version(groups, versions):
            ring = self._rings[version]
            left = ring.take(len(ring))
            ring.append(left[~np.isin(left, members)])
            self._change(version, -len(members))

    def _from(self, min_version: int | None) -> list[int]:
        first = 0 if min_version is None else bisect_left(self._versions, min_version)
        return self._versions[first:]

    def _ring(self, version: int) -> Ring:
        if version not in self._rings:
            self._rings[version] = Ring()
            self._counts[version] = 0
            insort(self._versions, version)
        return self._rings[version]

    def _change(self, version: int, change: int) -> None:
        self.total += change
        self._counts[version] += change
        if not self._counts[version]:  # what is left in the ring was dropped
            del self._rings[version], self._counts[version]
            self._versions.remove(version)


def _by_version(groups: Array, versions: Array) -> Iterator[tuple[int, Array]]:
    if len(groups) and (versions == versions[0]).all():
        yield int(versions[0]), groups
        return
    for version in np.unique(versions).tolist():
        yield version, groups[versions == version]
