"""Pieces of memory and of disk that values are appended to and read from."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import repeat

import numpy as np

from headrace.contract import Array


class Segment(ABC):
    """Bytes of many values. ``keys``: (column, row) of those that live in it; ``live``: their bytes; ``size``: of all
    that was ever appended."""

    def __init__(self) -> None:
        self.keys: set[tuple[str, int]] = set()
        self.live = 0
        self.size = 0

    @abstractmethod
    def read(self, start: int, into: Array) -> None:
        """Fill ``into`` (uint8) with the bytes from ``start`` on."""

    @abstractmethod
    def remove(self) -> None:
        """Nobody needs it any more."""

    def enter(self, name: str, rows: Sequence[int], nbytes: int) -> None:
        """Values of these rows live here, of ``nbytes`` together."""
        self.keys.update(zip(repeat(name), rows))
        self.live += nbytes

    def leave(self, name: str, row: int, nbytes: int) -> None:
        """A value is gone."""
        self.keys.remove((name, row))
        self.live -= nbytes


class MemorySegment(Segment):
    """A copy of what is given, in memory."""

    def __init__(self, parts: Sequence[Array]) -> None:
        super().__init__()
        self._bytes = np.concatenate(parts)
        self.size = len(self._bytes)

    def read(self, start: int, into: Array) -> None:
        into[:] = self._bytes[start : start + len(into)]

    def remove(self) -> None:
        self._bytes = self._bytes[:0]


class FileSegment(Segment):
    """A file that grows. Only whole appends count: one that failed leaves nothing behind."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path
        self._file: int | None = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def append(self, parts: Sequence[Array]) -> int:
        """Where the bytes of ``parts`` begin, which lie back to back. OSError, and nothing appended, when the disk does
        not take them."""
        assert self._file is not None, "a sealed segment takes no more"
        start = end = self.size
        try:
            for part in parts:
                end = self._write(part.data, end)
        except OSError:
            os.ftruncate(self._file, start)
            raise
        self.size = end
        return start

    def _write(self, data: memoryview, at: int) -> int:
        assert self._file is not None
        while len(data):
            written = os.pwrite(self._file, data, at)
            data, at = data[written:], at + written
        return at

    def seal(self) -> None:
        """Nothing will be appended any more. Twice is fine."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def read(self, start: int, into: Array) -> None:
        file = os.open(self._path, os.O_RDONLY)
        try:
            left = into.data
            while len(left):
                read = os.preadv(file, [left], start)
                if not read:
                    raise OSError(f"{self._path} ends at byte {start}, where a value was written")
                left, start = left[read:], start + read
        finally:
            os.close(file)

    def remove(self) -> None:
        self.seal()
        os.unlink(self._path)
