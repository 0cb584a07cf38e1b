"""Values in files of a directory, the newest in memory as far as it is allowed to be used.

What is put is appended to a segment file. A file is removed when nothing in it lives; what is left of one that is
mostly dead is appended anew. Invariant: a put that fails leaves nothing behind and takes nothing away.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import count, repeat
from typing import Any

import numpy as np

from headrace.contract import Array, Batch, Column, Storage, StorageStats
from headrace.errors import ConfigError, RunError
from headrace.wire import OwnDirectory
from headrace_storage.columns import bounds
from headrace_storage.index import Forgotten, Index, assemble, raw, runs
from headrace_storage.segments import FileSegment, MemorySegment, Segment

_MOSTLY_DEAD = 4
"""A file is rewritten when less than one part in so many of it lives."""


class DiskStorage(Storage):
    """Has a directory of its own in ``path`` from the first put that needs it until it is closed."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``path``: an absolute directory, by default the system's temporary one. ``memory_bytes``: of the newest
        values, which stay in memory; older ones go to disk. ``segment_bytes``: a file of this size takes no more."""

        path: str = ""
        memory_bytes: int = 0
        segment_bytes: int = 64 << 20

        def __post_init__(self) -> None:
            if self.path and not os.path.isabs(self.path):
                raise ValueError(f"path is absolute, got {self.path!r}")
            if self.memory_bytes < 0 or self.segment_bytes < 1:
                raise ValueError("memory_bytes is at least 0, segment_bytes at least 1")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._settings = settings
        self._directory: OwnDirectory | None = None
        self._names = count(1)
        self._index: Index[Segment] = Index()
        self._file: FileSegment | None = None
        """What is appended to."""
        self._memory: dict[MemorySegment, None] = {}
        """The oldest first."""
        self._in_memory = 0

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Any) -> None:
        path = settings.path or tempfile.gettempdir()
        if not os.path.isdir(path) or not os.access(path, os.W_OK | os.X_OK):
            raise ConfigError(
                f"values cannot be kept in {path}: it is no directory that this user can write to",
                origin=origin("path"),
                fix="make it, or name another one",
            )

    def put(self, batch: Batch) -> int:
        rows = self._index.check(batch)
        if not rows or not batch.columns:
            return 0
        parts = {name: raw(column) for name, column in batch.columns.items()}
        segment, start = self._write(list(parts.values()))
        stored = 0
        replaced: list[Forgotten[Segment]] = []
        for name, column in batch.columns.items():
            places = [start + bound for bound in bounds(column)]
            old = self._index.keep(rows, name, column, zip(repeat(segment), places[:-1], places[1:]))
            _leave(old)
            segment.enter(name, rows, len(parts[name]))
            replaced += old
            start += len(parts[name])
            stored += len(parts[name])
        self._reclaim(replaced)  # only now, since what was replaced may have lived in the same segment
        return stored

    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        found: dict[str, Column] = {}
        for name in columns:
            kind, values = self._index.find(rows, name)
            found[name] = assemble(kind, values, _read(values))
        return Batch(rows=np.asarray(rows, dtype=np.int64), columns=found)

    def delete(self, rows: Sequence[int]) -> None:
        gone = self._index.forget(rows)
        _leave(gone)
        self._reclaim(gone)

    def stats(self) -> StorageStats:
        return self._index.stats()

    def close(self) -> None:
        self._index.clear()
        self._memory.clear()
        self._in_memory = 0
        if self._file is not None:
            self._file.seal()
            self._file = None
        if self._directory is not None:
            self._directory.close()
            self._directory = None

    # ------------------------------------------------------------ writing

    def _write(self, parts: Sequence[Array]) -> tuple[Segment, int]:
        """Where the bytes are, from which place on. RunError when they cannot be kept."""
        nbytes = sum(map(len, parts))
        if nbytes > self._settings.memory_bytes:
            return self._append(parts)
        while self._in_memory + nbytes > self._settings.memory_bytes:
            self._move(next(iter(self._memory)))
        segment = MemorySegment(parts)
        self._memory[segment] = None
        self._in_memory += segment.size
        return segment, 0

    def _append(self, parts: Sequence[Array]) -> tuple[FileSegment, int]:
        try:
            if self._directory is None:
                self._directory = OwnDirectory(self._settings.path or tempfile.gettempdir(), "headrace-values-")
            if self._file is None:
                self._file = FileSegment(os.path.join(self._directory.path, f"{next(self._names)}.values"))
            segment, start = self._file, self._file.append(parts)
        except OSError as error:
            where = self._directory.path if self._directory else self._settings.path or tempfile.gettempdir()
            raise RunError(
                f"{sum(map(len, parts))} bytes of values cannot be written to {where}: {error.strerror}; "
                "what was stored before is still there",
                fix="free space there, name another `path`, or bound the storage unit's capacity by what is free",
            ) from error
        if segment.size >= self._settings.segment_bytes:
            segment.seal()
            self._file = None
        return segment, start

    # ------------------------------------------------------------ freeing

    def _reclaim(self, gone: Iterable[Forgotten[Segment]]) -> None:
        for segment in dict.fromkeys(value[0] for _, _, value in gone):
            if not segment.keys:
                self._remove(segment)
            elif self._is_mostly_dead(segment):
                try:
                    self._move(segment)
                except RunError:  # no room for what is left beside it: it stays as it is
                    continue

    def _is_mostly_dead(self, segment: Segment) -> bool:
        return segment not in self._memory and segment is not self._file and segment.live * _MOSTLY_DEAD < segment.size

    def _move(self, segment: Segment) -> None:
        """Append what lives in a segment, and remove it."""
        found = [(name, row, self._index.find([row], name)[1][0]) for name, row in segment.keys]
        found.sort(key=lambda entry: entry[2][1])
        target, at = self._append([_read([value for _, _, value in found])])
        for name, row, (_, start, stop) in found:
            self._index.move(name, row, (target, at, at + stop - start))
            target.enter(name, [row], stop - start)
            at += stop - start
        self._remove(segment)

    def _remove(self, segment: Segment) -> None:
        if isinstance(segment, MemorySegment):
            del self._memory[segment]
            self._in_memory -= segment.size
        elif segment is self._file:
            self._file = None
        segment.remove()


def _leave(gone: Iterable[Forgotten[Segment]]) -> None:
    for name, row, (segment, start, stop) in gone:
        segment.leave(name, row, stop - start)


def _read(values: Sequence[tuple[Segment, int, int]]) -> Array:
    """The bytes of these values, joined."""
    joined = np.empty(sum(stop - start for _, start, stop in values), np.uint8)
    at = 0
    for segment, start, stop in runs(values):
        segment.read(start, joined[at : at + stop - start])
        at += stop - start
    return joined
