"""Values in memory that every process of this user on this host can map: producers write them there themselves, and
consumers read them without a copy.

Invariant: bytes are given back when their value is deleted, those of values too small for that when the last of their
put is; nobody is given bytes that a living producer may still write to.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count, pairwise, repeat
from typing import Any

import numpy as np

from headrace.contract import Array, Batch, Column, Placed, Region, SharedMemory, Storage, StorageStats
from headrace.errors import ConfigError, ContractError, RunError
from headrace.wire import OwnDirectory, unlocked
from headrace_storage.columns import bounds, nbytes_of
from headrace_storage.index import Forgotten, Index, assemble, lengths, raw, runs
from headrace_storage.pool import ALIGNMENT, Pool, Segment

_LEAVES_ALONE = 512
"""Bytes of a value from which on it is given back by itself."""
_DIRECTORY = "/dev/shm"


@dataclass(slots=True, eq=False)
class _Area:
    """The bytes of a column of one put. ``live``: values left in one that is given back as a whole, else None."""

    segment: Segment
    start: int
    stop: int
    live: int | None


@dataclass(slots=True, eq=False)
class _Reservation:
    """``columns``: with which it was opened."""

    region: Region
    segment: Segment
    owner: str
    columns: Mapping[str, Column] | None = None
    starts: dict[str, int] = field(default_factory=dict)


class SharedMemoryStorage(Storage, SharedMemory):
    """Has a directory of its own in ``directory`` until it is closed."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``directory``: of a file system in memory. ``segment_bytes``: of one file; a put that is larger has one of
        its own. ``spare_bytes``: how much memory that is free again is kept to be used again."""

        directory: str = _DIRECTORY
        segment_bytes: int = 64 << 20
        spare_bytes: int = 1 << 30

        def __post_init__(self) -> None:
            if not os.path.isabs(self.directory):
                raise ValueError(f"directory is absolute, got {self.directory!r}")
            if self.segment_bytes < 1 or self.spare_bytes < 0:
                raise ValueError("segment_bytes is at least 1, spare_bytes at least 0")

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._home = OwnDirectory(settings.directory, "headrace-values-")
        self._pool = Pool(self._home.path, segment_bytes=settings.segment_bytes, spare_bytes=settings.spare_bytes)
        self._index: Index[_Area] = Index()
        self._reserved: dict[int, _Reservation] = {}
        self._numbers = count(1)

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Any) -> None:
        if not os.access(settings.directory, os.W_OK | os.X_OK):
            raise ConfigError(
                f"no memory can be shared in {settings.directory}: it is no directory that this user can write to",
                origin=origin("directory"),
                fix=f"name a file system in memory, which is {_DIRECTORY} on most systems",
            )

    # ------------------------------------------------------------ as any storage

    def put(self, batch: Batch) -> int:
        rows = self._index.check(batch)
        if not rows or not batch.columns:
            return 0
        starts, total = {}, 0
        for name, column in batch.columns.items():
            starts[name], total = total, _aligned(total + nbytes_of(column))
        taken = self._pool.take(total)
        if taken is None:
            raise RunError(
                f"{total} bytes of values find no room in the shared memory of {self._home.path}; "
                "what was stored before is still there",
                fix="bound the storage unit's capacity by what the system has, or give it more units on other hosts",
            )
        segment, start = taken
        for name, column in batch.columns.items():
            begin = start + starts[name]
            segment.data[begin : begin + nbytes_of(column)] = raw(column)
        places = {name: start + offset for name, offset in starts.items()}
        return self._keep(rows, batch.columns, segment, places, start, start + total)

    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        found: dict[str, Column] = {}
        for name in columns:
            kind, values = self._index.find(rows, name)
            parts = [segment.data[start:stop] for segment, start, stop in _segment_runs(values)]
            found[name] = assemble(kind, values, np.concatenate([*parts, np.empty(0, np.uint8)]))
        return Batch(rows=np.asarray(rows, dtype=np.int64), columns=found)

    def delete(self, rows: Sequence[int]) -> None:
        self._free(self._index.forget(rows))

    def stats(self) -> StorageStats:
        return self._index.stats()

    def close(self) -> None:
        self._index.clear()
        self._reserved.clear()
        self._pool.close()
        self._home.close()

    # ------------------------------------------------------------ as shared memory

    @property
    def directory(self) -> str:
        return self._home.path

    def reserve(self, nbytes: int, *, owner: str) -> Region | None:
        if os.path.basename(owner) != owner or not owner or nbytes < 1:
            raise ContractError(
                f"{nbytes} bytes were to be reserved for {owner!r}",
                fix="name a file in the storage's directory, and at least one byte",
            )
        self._take_back(owner)
        taken = self._pool.take(nbytes)
        if taken is None:
            return None
        segment, start = taken
        region = Region(number=next(self._numbers), segment=segment.name, offset=start, nbytes=nbytes)
        self._reserved[region.number] = _Reservation(region, segment, owner)
        return region

    def open(self, region: Region, columns: Mapping[str, Placed]) -> dict[str, Column]:
        reservation = self._reserved.get(region.number)
        if reservation is None or reservation.region != region or reservation.columns is not None:
            raise ContractError(f"{region} is not reserved, or not any more", fix="reserve a region for every put")
        starts, ends = {}, []
        try:
            for name, placed in columns.items():
                starts[name], end = _inside(region, placed)
                ends.append((starts[name], end))
            opened = {name: placed.column(lambda _: reservation.segment.data) for name, placed in columns.items()}
        except ValueError as error:
            raise ContractError(
                f"a column does not lie in {region}: {error}", fix="place each column as one run"
            ) from None
        if any(end > start for (_, end), (start, _) in pairwise(sorted(ends))):
            raise ContractError(f"columns overlap in {region}", fix="place them one after another")
        reservation.columns, reservation.starts = opened, starts
        return opened

    def adopt(self, region: Region, rows: Array) -> int:
        reservation = self._reserved[region.number]
        assert reservation.columns is not None, "a region is opened before it is adopted"
        checked = self._index.check(Batch(rows=rows, columns=reservation.columns))
        del self._reserved[region.number]
        segment, start = reservation.segment, region.offset
        return self._keep(checked, reservation.columns, segment, reservation.starts, start, start + region.nbytes)

    def abandon(self, region: Region) -> None:
        reservation = self._reserved.pop(region.number, None)
        if reservation is not None:
            self._pool.give(reservation.segment, region.offset, region.offset + region.nbytes)

    def locate(self, rows: Sequence[int], columns: Sequence[str]) -> dict[str, Placed]:
        return {name: self._placed(rows, name) for name in columns}

    # ------------------------------------------------------------ inside

    def _placed(self, rows: Sequence[int], name: str) -> Placed:
        kind, values = self._index.find(rows, name)
        segments: dict[str, int] = {}
        found = [
            (segments.setdefault(segment.name, len(segments)), start, stop - start)
            for segment, start, stop in _segment_runs(values)
        ]
        return Placed(
            like=np.empty((0, *kind[2]), kind[1]),
            count=len(values),
            lengths=lengths(kind, values),
            segments=tuple(segments),
            runs=np.array(found, np.int64).reshape(-1, 3),
        )

    def _take_back(self, owner: str) -> None:
        """What was reserved and will not be used."""
        for reservation in list(self._reserved.values()):
            if reservation.columns is None and (reservation.owner == owner or self._is_gone(reservation.owner)):
                self.abandon(reservation.region)

    def _is_gone(self, owner: str) -> bool:
        return unlocked(os.path.join(self._home.path, owner))

    def _keep(
        self,
        rows: list[int],
        columns: Mapping[str, Column],
        segment: Segment,
        starts: Mapping[str, int],
        begin: int,
        end: int,
    ) -> int:
        """Values that lie in taken bytes, the rest of which is free with what lies before it."""
        places = {name: [starts[name] + bound for bound in bounds(column)] for name, column in columns.items()}
        small = {name for name, found in places.items() if _smallest(found) < _LEAVES_ALONE}
        together = _Area(segment, begin, end, len(rows) * len(columns))  # all of a put that is small
        order = sorted(columns, key=lambda name: (places[name][0], places[name][-1]))
        stored, replaced = 0, []
        for name, until in zip(order, [*(places[name][0] for name in order[1:]), end], strict=True):
            found = places[name]
            area = together
            if len(small) < len(columns):
                area = _Area(segment, found[0], until, len(rows) if name in small else None)
                if name not in small:
                    self._pool.give(segment, found[-1], until)
            replaced += self._index.keep(rows, name, columns[name], zip(repeat(area), found[:-1], found[1:]))
            stored += found[-1] - found[0]
        self._free(replaced)
        return stored

    def _free(self, gone: Iterable[Forgotten[_Area]]) -> None:
        extents: list[tuple[Segment, int, int]] = []
        for _, _, (area, start, stop) in gone:
            if area.live is None:
                extents.append((area.segment, start, stop))
                continue
            area.live -= 1
            if not area.live:
                extents.append((area.segment, area.start, area.stop))
        extents.sort(key=lambda extent: (extent[0].name, extent[1]))
        for segment, start, stop in runs(extents):
            self._pool.give(segment, start, stop)


def _smallest(places: Sequence[int]) -> int:
    return min(after - before for before, after in pairwise(places))


def _segment_runs(values: Iterable[tuple[_Area, int, int]]) -> Iterable[tuple[Segment, int, int]]:
    return runs((area.segment, start, stop) for area, start, stop in values)


def _inside(region: Region, placed: Placed) -> tuple[int, int]:
    """Where a column begins and ends. ValueError when it is not one run inside the region."""
    if placed.segments != (region.segment,) or len(placed.runs) != 1 or placed.count < 1:
        raise ValueError(f"it is {placed.count} rows in {len(placed.runs)} runs of {placed.segments}")
    if placed.lengths is not None and (len(placed.lengths) != placed.count or (placed.lengths < 0).any()):
        raise ValueError(f"lengths {placed.lengths} of {placed.count} rows")
    nbytes = placed.nbytes
    place, start, _ = placed.runs[0].tolist()
    if place != 0 or start % ALIGNMENT or start < region.offset or start + nbytes > region.offset + region.nbytes:
        raise ValueError(f"it lies at {start}, {nbytes} bytes long")
    return start, start + nbytes


def _aligned(nbytes: int) -> int:
    """At least one byte, so that there is a place for it."""
    return -(-max(nbytes, 1) // ALIGNMENT) * ALIGNMENT
