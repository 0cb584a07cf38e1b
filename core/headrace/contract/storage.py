"""The ``storage`` role: column values of one storage unit. What may be read when is core's business.

A storage whose values lie in files of memory is also :class:`SharedMemory`: processes on its host then write and read
them there, and only say where.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from headrace.contract.columns import Array, Batch, Column, Ragged
from headrace.contract.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStats:
    """Rows with at least one column, and the bytes of all values."""

    rows: int
    nbytes: int


class Storage(Plugin, ABC):
    """Values by (row, column). Used from one thread. A row is any int64: what rows share is kept under ids below 0."""

    @abstractmethod
    def put(self, batch: Batch) -> int:
        """Store every column of every row; other columns of these rows stay as they are. Returns the bytes stored.
        The arrays belong to the storage afterwards: it copies a view that would pin more memory than it needs.
        ContractError, and nothing stored, when the batch names a row twice or a column has another dtype or shape."""

    @abstractmethod
    def get(self, rows: Sequence[int], columns: Sequence[str]) -> Batch:
        """These columns of these rows, in this order. KeyError names an absent row or column."""

    @abstractmethod
    def delete(self, rows: Sequence[int]) -> None:
        """Free these rows; unknown ones are ignored."""

    @abstractmethod
    def stats(self) -> StorageStats:
        """O(1)."""

    @abstractmethod
    def close(self) -> None:
        """Free everything; may be called twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Region:
    """Bytes of a segment, reserved for one put. ``number``: no other reservation of the storage has it; ``segment``: a
    file of the storage's directory."""

    number: int
    segment: str
    offset: int
    nbytes: int


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Placed:
    """Where the values of a column lie. ``like``: [0, ...], an array of the dtype and shape of one value, or of one
    entry of a ragged column; ``count``: rows; ``lengths``: int64 [count] for a ragged column, else None; ``runs``:
    int64 [r, 3], each a place in ``segments``, an offset and a number of bytes; joined they are the values of all rows.
    """

    like: Array
    count: int
    lengths: Array | None
    segments: tuple[str, ...]
    runs: Array

    @property
    def nbytes(self) -> int:
        """Of all rows. ValueError when the runs are not as many bytes as the rows."""
        entries = self.count if self.lengths is None else int(self.lengths.sum())
        nbytes = entries * self.like.dtype.itemsize * prod(self.like.shape[1:])
        if self.runs.ndim != 2 or self.runs.shape[1] != 3 or int(self.runs[:, 2].sum()) != nbytes:
            raise ValueError(f"{entries} values of {self.like.dtype} {self.like.shape[1:]} do not lie in {self.runs}")
        return nbytes

    def column(self, mapped: Callable[[str], Array]) -> Column:
        """The values; a view when they are one run, else one copy. ``mapped``: a segment's bytes, as uint8."""
        nbytes, parts = self.nbytes, []
        for place, offset, size in self.runs.tolist():
            parts.append(mapped(self.segments[place])[offset : offset + size])
        joined = parts[0] if len(parts) == 1 else np.concatenate([*parts, np.empty(0, np.uint8)])
        if len(joined) != nbytes:
            raise ValueError(f"runs {self.runs} reach beyond their segments")
        shape = self.like.shape[1:]
        if self.lengths is None:
            return joined.view(self.like.dtype).reshape(self.count, *shape)
        offsets = np.zeros(self.count + 1, np.int64)
        np.cumsum(self.lengths, out=offsets[1:])
        return Ragged(joined.view(self.like.dtype).reshape(int(offsets[-1]), *shape), offsets)


class SharedMemory(ABC):
    """Capability of a :class:`Storage`: its values lie in segments, files of memory that others on this host map.

    A producer reserves a region, writes its values there and says where each column lies; the storage *opens* the
    region and then either adopts or abandons it. A consumer is told where values lie and maps them to be read. Bytes of
    a row are used again once it is deleted: whoever has views of it must be done with them by then."""

    @property
    @abstractmethod
    def directory(self) -> str:
        """Of the segments; nobody but this user can open it. It goes when the storage is closed."""

    @abstractmethod
    def reserve(self, nbytes: int, *, owner: str) -> Region | None:
        """Bytes for one put, from an offset that suits every dtype; None when there is no room. ``owner``: a file in
        the directory that the producer keeps locked (``flock``) as long as it lives. What an owner that died had
        reserved is free again, and so is what this one reserved before, where it is not opened."""

    @abstractmethod
    def open(self, region: Region, columns: Mapping[str, Placed]) -> dict[str, Column]:
        """What was written to a region, as views. ContractError, and nothing opened, when the region is not reserved,
        or not any more, or a column is not one run inside it."""

    @abstractmethod
    def adopt(self, region: Region, rows: Array) -> int:
        """:meth:`Storage.put`, without a copy, of the columns with which a region was opened: they are of these rows.
        After a ContractError the region is still open."""

    @abstractmethod
    def abandon(self, region: Region) -> None:
        """The region is free; one that is not known any more is ignored."""

    @abstractmethod
    def locate(self, rows: Sequence[int], columns: Sequence[str]) -> dict[str, Placed]:
        """Where these columns of these rows lie, in this order. KeyError as of :meth:`Storage.get`."""
