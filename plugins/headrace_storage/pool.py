"""Bytes of shared memory, taken and given back: files that are mapped, and which of their bytes are free.

The pages of a file are there from the moment it is made: fresh ones cost more than the copy into them, and one that
the system cannot provide would end the process that touches it. Bytes that are given back are used again.
"""

from __future__ import annotations

import errno
import mmap
import os
from bisect import bisect_left, insort
from dataclasses import dataclass
from itertools import count

import numpy as np

from headrace.contract import Array

ALIGNMENT = 64
"""Of what is taken: suits every dtype, and a cache line."""
_PAGE = 2 << 20


@dataclass(frozen=True, slots=True, eq=False)
class Segment:
    """A file and its bytes, as uint8."""

    name: str
    data: Array


class Pool:
    """Files in ``directory`` of ``segment_bytes``, or of as much as is taken at once. Those in which nothing is taken
    are kept as long as no more than ``spare_bytes`` are free."""

    def __init__(self, directory: str, *, segment_bytes: int, spare_bytes: int) -> None:
        self._directory = directory
        self._segment_bytes = segment_bytes
        self._spare_bytes = spare_bytes
        self._names = count(1)
        self._segments: dict[str, Segment] = {}
        self._sizes: list[tuple[int, str, int]] = []
        """Free bytes: size, segment, start; smallest first. No two of them touch."""
        self._stop_of: dict[tuple[str, int], int] = {}
        self._start_of: dict[tuple[str, int], int] = {}
        self._free = 0

    def take(self, nbytes: int) -> tuple[Segment, int] | None:
        """Bytes that are used by nobody, from an aligned start on; None when the system has no more memory."""
        found = self._find(nbytes) or (self._grow(nbytes) and self._find(nbytes))
        if not found:
            return None
        name, start, stop = found
        begin = _aligned(start)
        self._remove(name, start, stop)
        self._add(name, start, begin)
        self._add(name, begin + nbytes, stop)
        return self._segments[name], begin

    def give(self, segment: Segment, start: int, stop: int) -> None:
        """Bytes that nobody uses any more."""
        name = segment.name
        if start == stop:
            return
        before, after = self._start_of.get((name, start)), self._stop_of.get((name, stop))
        if before is not None:
            self._remove(name, before, start)
            start = before
        if after is not None:
            self._remove(name, stop, after)
            stop = after
        self._add(name, start, stop)
        if start == 0 and stop == len(segment.data) and self._free > self._spare_bytes:
            self._drop(name)

    def close(self) -> None:
        """Forget every segment; the files are the directory's matter."""
        for table in (self._segments, self._sizes, self._stop_of, self._start_of):
            table.clear()
        self._free = 0

    # ------------------------------------------------------------ inside

    def _find(self, nbytes: int) -> tuple[str, int, int] | None:
        """The smallest free bytes that are enough."""
        for place in range(bisect_left(self._sizes, (nbytes,)), len(self._sizes)):
            size, name, start = self._sizes[place]
            if _aligned(start) + nbytes <= start + size:
                return name, start, start + size
        return None

    def _grow(self, nbytes: int) -> bool:
        """Whether there is another segment."""
        size = self._segment_bytes if nbytes <= self._segment_bytes else -(-nbytes // _PAGE) * _PAGE
        segment = self._make(size)
        if segment is None:
            for name in [name for name, known in self._segments.items() if self._is_empty(known)]:
                self._drop(name)
            segment = self._make(size)
        if segment is None:
            return False
        self._segments[segment.name] = segment
        self._add(segment.name, 0, size)
        return True

    def _make(self, size: int) -> Segment | None:
        name = f"{next(self._names)}.values"
        path = os.path.join(self._directory, name)
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            os.posix_fallocate(file, 0, size)
            return Segment(name, np.frombuffer(mmap.mmap(file, size), np.uint8))
        except OSError as error:
            os.unlink(path)
            if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EFBIG):
                return None
            raise
        finally:
            os.close(file)

    def _is_empty(self, segment: Segment) -> bool:
        return self._stop_of.get((segment.name, 0)) == len(segment.data)

    def _drop(self, name: str) -> None:
        self._remove(name, 0, len(self._segments.pop(name).data))
        os.unlink(os.path.join(self._directory, name))

    def _add(self, name: str, start: int, stop: int) -> None:
        if start < stop:
            insort(self._sizes, (stop - start, name, start))
            self._stop_of[name, start] = stop
            self._start_of[name, stop] = start
            self._free += stop - start

    def _remove(self, name: str, start: int, stop: int) -> None:
        del self._sizes[bisect_left(self._sizes, (stop - start, name, start))]
        del self._stop_of[name, start]
        del self._start_of[name, stop]
        self._free -= stop - start


def _aligned(offset: int) -> int:
    return -(-offset // ALIGNMENT) * ALIGNMENT
