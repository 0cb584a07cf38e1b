"""Shared memory as producers and consumers use it: values are written and read where the storage unit keeps them.

A unit whose storage is :class:`~headrace.contract.SharedMemory` says in which directory its segments are. Whoever can
map them sends no values: a producer copies them once, into bytes that it has reserved, and a consumer gets views. Who
cannot, being on another host, says everything in messages; so do small puts, which a message costs less.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from time import monotonic
from typing import Self, TypeGuard

import numpy as np

from headrace.contract import Array, Batch, Column, Placed, Ragged, Region, Repeated
from headrace.dataplane.contents import Value
from headrace.dataplane.messages import Fetch, Found, Noted, Put, PutPlaced, Reserve, Reserved
from headrace.wire import BlockingClient, Meanwhile

SHARED_BYTES = 1 << 16
"""From here on values are not sent: a message of fewer costs less than the words that it saves."""
_ALIGNMENT = 64
LOOK_SECONDS = 1.0
"""How often segments are looked for that are gone."""


class Segments:
    """Those of one unit, in ``directory``, as one thread maps them. OSError when this process cannot have them."""

    def __init__(self, directory: str) -> None:
        found = os.stat(directory)
        if found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
            raise PermissionError(f"{directory} is not this user's alone")
        self._directory = directory
        self._process = os.getpid()
        self.owner = f"client-{self._process}-{secrets.token_hex(4)}"
        """A file that is locked as long as this process lives: by it the unit knows whose reservations still count."""
        self._lock = open(self._path(self.owner), "xb")  # noqa: SIM115 - it is held until close
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._written: dict[str, Array] = {}
        self._read: dict[str, Array] = {}
        self._looked = monotonic()

    @classmethod
    def reach(cls, directory: str) -> Self | None:
        """None where there are none, or they are out of reach."""
        try:
            return cls(directory) if directory else None
        except OSError:
            return None

    def write(self, region: Region, columns: Mapping[str, Column]) -> dict[str, Placed]:
        """Copy values into a region that has :func:`room_for` them; says where they lie."""
        segment = self._mapped(self._written, region.segment, mmap.PROT_READ | mmap.PROT_WRITE)
        placed, start = {}, region.offset
        for name, column in columns.items():
            values = _values(column)
            stop = start + values.nbytes
            np.copyto(segment[start:stop].view(values.dtype).reshape(values.shape), values)
            placed[name] = Placed(
                like=values[:0],
                count=len(column),
                lengths=column.lengths if isinstance(column, Ragged) else None,
                segments=(region.segment,),
                runs=np.array([[0, start, values.nbytes]]),
            )
            start = _aligned(stop)
        return placed

    def read(self, placed: Placed) -> Column:
        """The values, read-only; a view when they are one run."""
        return placed.column(lambda name: self._mapped(self._read, name, mmap.PROT_READ))

    def batch(self, fetch: Fetch, found: Found) -> Batch:
        """What a unit answered that was asked where rows lie."""
        read = {
            name: found.sent[name] if name in found.sent else self.read(found.placed[name]) for name in fetch.columns
        }
        return Batch(
            rows=fetch.rows,
            columns={name: column for name, column in read.items() if name not in found.places},
            repeated={name: Repeated(read[name], places) for name, places in found.places.items()},
        )

    def close(self) -> None:
        """Views stay valid. Twice is fine."""
        self._written.clear()
        self._read.clear()
        if not self._lock.closed:
            self._lock.close()
            if self._process == os.getpid():  # and not forked from it, which holds the lock still
                with suppress(FileNotFoundError):  # the unit was closed before
                    os.unlink(self._path(self.owner))

    def _mapped(self, known: dict[str, Array], name: str, protection: int) -> Array:
        self._forget_gone()
        if name not in known:
            writing = bool(protection & mmap.PROT_WRITE)
            file = os.open(self._path(name), (os.O_RDWR if writing else os.O_RDONLY) | os.O_NOFOLLOW)
            try:
                # The pages are there already: all entries of the page table at once cost less than a fault for each.
                flags = mmap.MAP_SHARED | mmap.MAP_POPULATE
                mapped = mmap.mmap(file, os.fstat(file).st_size, flags=flags, prot=protection)
            finally:
                os.close(file)
            known[name] = np.frombuffer(mapped, np.uint8)
        return known[name]

    def _forget_gone(self) -> None:
        """A segment that the unit gave back to the system is memory until nobody maps it."""
        if monotonic() < self._looked + LOOK_SECONDS:
            return
        for known in (self._written, self._read):
            for name in [name for name in known if not os.path.exists(self._path(name))]:
                del known[name]
        self._looked = monotonic()

    def _path(self, name: str) -> str:
        return os.path.join(self._directory, os.path.basename(name))


def put_shared(
    client: BlockingClient,
    segments: Segments,
    put: Put,
    columns: Mapping[str, Column],
    *,
    deadline: float,
    meanwhile: Meanwhile | None,
) -> Noted | None:
    """Write the columns of a put to the unit's memory and tell it; None where there is no room, or the memory cannot be
    mapped."""
    until = monotonic() + deadline
    request = Reserve(room_for(columns), segments.owner)
    reserved = client.call(
        "reserve",
        request,
        reply=Reserved,
        deadline=deadline,
        awaiting="a storage unit to reserve memory",
        meanwhile=meanwhile,
    )
    if reserved.region is None:
        return None
    try:
        placed = segments.write(reserved.region, columns)
    except OSError:
        return None  # what was reserved is free with this client's next reservation
    told = PutPlaced(put.partition, put.rows, reserved.region, placed, put.version, put.made, put.once, put.wait)
    left = max(until - monotonic(), 0.001)
    awaiting = "a storage unit to keep rows"
    return client.call("put_placed", told, reply=Noted, deadline=left, awaiting=awaiting, meanwhile=meanwhile)


class Reading:
    """A read that is under way."""

    def __init__(
        self,
        client: BlockingClient,
        segments: Segments | None,
        fetch: Fetch,
        *,
        deadline: float,
        meanwhile: Meanwhile | None,
    ) -> None:
        self._client, self._segments, self._fetch, self._deadline = client, segments, fetch, deadline
        self._meanwhile = meanwhile
        method = "get" if segments is None else "locate"
        self._sent = client.send(method, fetch, deadline=deadline, awaiting="a storage unit to send rows")

    def batch(self) -> Batch:
        """The rows."""
        if self._segments is None:
            return self._client.receive(self._sent, Batch, self._meanwhile)
        found = self._client.receive(self._sent, Found, self._meanwhile)
        try:
            return self._segments.batch(self._fetch, found)
        except OSError:  # this process cannot map what it should: it has too many files open, or too little memory
            return self._client.call(
                "get",
                self._fetch,
                reply=Batch,
                deadline=self._deadline,
                awaiting="a storage unit to send rows",
                meanwhile=self._meanwhile,
            )

    def cancel(self) -> None:
        """Nobody waits for them any more."""
        self._client.cancel(self._sent)


def are_large(columns: Mapping[str, Value]) -> TypeGuard[Mapping[str, Column]]:
    """Whether they are better written to shared memory than sent; not where rows share values, which a unit compares
    with those that it has."""
    nbytes = 0
    for column in columns.values():
        if isinstance(column, Repeated):
            return False
        nbytes += _values(column).nbytes
    return nbytes >= SHARED_BYTES


def room_for(columns: Mapping[str, Column]) -> int:
    """Bytes, with what lies between the columns."""
    return sum(_aligned(int(_values(column).nbytes)) for column in columns.values())


def _values(column: Column) -> Array:
    return column.values if isinstance(column, Ragged) else column


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT
