"""The publisher's segments: files in memory without a name, who reads them, and when they are written to again.

Invariant: a segment is written to only while nobody reads it. A reader that left without saying that it has released
what it read may still have it mapped: such a segment is never written to again, and lives until its last reader ends.
"""

from __future__ import annotations

import mmap
import os
from collections import Counter
from collections.abc import Hashable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from itertools import count

import xxhash

from headrace.contract import Array, TensorInfo
from headrace.errors import RunError
from headrace.wire import array_bytes
from headrace_weights.tensors import aligned

_COPIED = 1 << 20
"""Bytes that are copied and summed at a time: they are still in the processor's cache for the second."""


@dataclass(slots=True, eq=False)
class Segment:
    """``readers``: leases by reader. ``retired``: its version is served no more."""

    number: int
    file: int
    readable: int
    """The same file, for those who must not write to it."""
    nbytes: int = 0
    mapped: memoryview = field(default_factory=lambda: memoryview(b""))
    """Of as much as there was when it was last mapped, to be written to."""
    readers: Counter[Hashable] = field(default_factory=Counter)
    retired: bool = False
    abandoned: bool = False
    """A reader is gone that had not released it."""

    def append(self, name: str, tensor: Array) -> TensorInfo:
        """Copy one tensor behind the others. RunError when there is no memory for it."""
        data = array_bytes(tensor if tensor.flags.c_contiguous else tensor.copy(order="C"))
        self.nbytes = at = aligned(self.nbytes)
        checksum = xxhash.xxh3_128()
        for start in range(0, len(data), _COPIED):
            part = data[start : start + _COPIED]
            checksum.update(part)
            at = self._write(part, at)
        self.nbytes = at
        return TensorInfo(name=name, dtype=tensor.dtype.name, shape=tuple(tensor.shape), checksum=checksum.hexdigest())

    def map(self) -> None:
        """Its pages are there, from the version before: into a mapping of them the copy is fastest. The first write to
        a page that is not there costs several times the copy, through a mapping more than through the file."""
        size = os.fstat(self.file).st_size
        if size <= len(self.mapped):
            return
        with suppress(OSError):  # then it is written to as the file that it is
            self.mapped = memoryview(mmap.mmap(self.file, size, flags=mmap.MAP_SHARED | mmap.MAP_POPULATE))

    def _write(self, data: memoryview, at: int) -> int:
        """Where the data ends."""
        end = at + len(data)
        if end > len(self.mapped):
            return _write(self.file, data, at)
        self.mapped[at:end] = data
        return end

    def finish(self) -> None:
        """All tensors are there. It may have been longer for another version, and is longer than what was written when
        the last tensors are empty."""
        size = os.fstat(self.file).st_size
        if self.nbytes < size:
            self.mapped = memoryview(b"")  # whose end is no memory any more
        if self.nbytes != size:
            os.ftruncate(self.file, self.nbytes)

    def close(self) -> None:
        """The memory is free when its last reader is gone."""
        self.mapped = memoryview(b"")
        os.close(self.file)
        os.close(self.readable)


class Segments:
    """All of one publisher; not thread-safe. One that is free is kept to be written to again, which is several times
    faster than memory that is fresh from the system."""

    def __init__(self) -> None:
        self._numbers = count(1)
        self._all: dict[int, Segment] = {}
        self._spare: Segment | None = None

    @property
    def numbers(self) -> tuple[int, ...]:
        """Of those that exist."""
        return tuple(self._all)

    def take(self) -> Segment:
        """An empty one. RunError when the system has none."""
        segment, self._spare = self._spare, None
        if segment is None:
            with _room():
                file = os.memfd_create("headrace-weights", os.MFD_CLOEXEC)
                segment = Segment(next(self._numbers), file, _readable(file))
            self._all[segment.number] = segment
        else:
            segment.map()
        segment.nbytes, segment.retired = 0, False
        return segment

    def retire(self, segment: Segment) -> None:
        """What it holds is served no more, to those who do not read it already."""
        segment.retired = True
        self._free_unread(segment)

    def lease(self, segment: Segment, reader: Hashable) -> None:
        """``reader`` reads it, once more."""
        segment.readers[reader] += 1

    def release(self, number: int, reader: Hashable) -> None:
        """One lease has ended; one that there is not is ignored."""
        segment = self._all.get(number)
        if segment is None or not segment.readers[reader]:
            return
        segment.readers[reader] -= 1
        segment.readers += Counter()  # forgets those that have none left
        self._free_unread(segment)

    def gone(self, reader: Hashable) -> None:
        """``reader`` will say nothing any more."""
        for segment in list(self._all.values()):
            if segment.readers.pop(reader, 0):
                segment.abandoned = True
                self._free_unread(segment)

    def close(self) -> None:
        """Everything. Twice is fine."""
        for segment in self._all.values():
            segment.close()
        self._all.clear()
        self._spare = None

    def _free_unread(self, segment: Segment) -> None:
        if not segment.retired or segment.readers or segment is self._spare:
            return
        if segment.abandoned or self._spare is not None:
            del self._all[segment.number]
            segment.close()
        else:
            self._spare = segment


def file_of(data: bytes) -> int:
    """A file in memory that can only be read. RunError when the system has no room for it."""
    with _room():
        file = os.memfd_create("headrace-manifest", os.MFD_CLOEXEC)
        try:
            _write(file, memoryview(data), 0)
            return _readable(file)
        finally:
            os.close(file)


def _readable(file: int) -> int:
    """The same file, opened for reading only."""
    return os.open(f"/proc/self/fd/{file}", os.O_RDONLY | os.O_CLOEXEC)


def _write(file: int, data: memoryview, at: int) -> int:
    """Where the data ends."""
    with _room():
        while len(data):
            written = os.pwrite(file, data, at)
            data, at = data[written:], at + written
    return at


@contextmanager
def _room() -> Iterator[None]:
    """What the system refuses becomes a RunError."""
    try:
        yield
    except OSError as error:
        raise RunError(
            f"weights find no room in shared memory: {error.strerror}",
            fix="give the machine more memory or open files, keep fewer versions alive at a time, or set "
            'weights.use = "zmq"',
        ) from error
