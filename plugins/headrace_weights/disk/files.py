"""Files in the safetensors format: the header's length in 8 bytes, little-endian, the header as JSON, the bytes.

Invariant: a file that has its name is whole. It is written under a hidden one and renamed.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.contract import Array
from headrace.errors import WireError
from headrace.wire import array_bytes

_LENGTH = 8
_LARGEST_HEADER = 1 << 28
_MOVED = 8 << 20
_METADATA = "__metadata__"
_DTYPES: Mapping[str, str] = {
    "bool": "BOOL",
    "int8": "I8",
    "uint8": "U8",
    "int16": "I16",
    "uint16": "U16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "uint32": "U32",
    "float32": "F32",
    "int64": "I64",
    "uint64": "U64",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
}
"""numpy's name → the format's. Others are written as bytes: their dtype is in the manifest."""


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


class FileWriter:
    """Of the file ``path``, tensor by tensor. The header is known last and stands first: ``reserve`` bytes are kept
    free for it, and what was written is moved once when it turns out larger. OSError when the disk refuses it."""

    def __init__(self, path: Path, *, reserve: int) -> None:
        self._path = path
        self._hidden = path.with_name(f".{path.name}.partial")
        self._file = os.open(self._hidden, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self._reserve = reserve
        self._entries: dict[str, _Entry] = {}
        self.nbytes = 0
        """Of the tensors so far."""

    def add(self, name: str, tensor: Array) -> None:
        """One more, C-contiguous."""
        end = self.nbytes + tensor.nbytes
        dtype, shape = _DTYPES.get(tensor.dtype.name), tuple(tensor.shape)
        if dtype is None:
            dtype, shape = "U8", (tensor.nbytes,)
        self._entries[name] = _Entry(dtype, shape, (self.nbytes, end))
        _write(self._file, array_bytes(tensor), _LENGTH + self._reserve + self.nbytes)
        self.nbytes = end

    def commit(self, metadata: Mapping[str, str]) -> int:
        """Give it its name. The header's bytes, which are a good guess at those of the next file."""
        header = msgspec.json.encode({_METADATA: metadata, **self._entries})
        size = -(-len(header) // _LENGTH) * _LENGTH
        if size > self._reserve:
            self._move(size)
        _write(self._file, memoryview(self._reserve.to_bytes(_LENGTH, "little") + header.ljust(self._reserve)), 0)
        os.close(self._file)
        # Not synced: after a loss of power nobody wants these weights, and until then all readers see what was written.
        self._hidden.rename(self._path)
        return size

    def discard(self) -> None:
        """Nothing of it stays."""
        with suppress(OSError):
            os.close(self._file)
        self._hidden.unlink(missing_ok=True)

    def _move(self, reserve: int) -> None:
        for end in range(self.nbytes, 0, -_MOVED):  # from the end on: the two places overlap
            start = max(0, end - _MOVED)
            data = os.pread(self._file, end - start, _LENGTH + self._reserve + start)
            _write(self._file, memoryview(data), _LENGTH + reserve + start)
        self._reserve = reserve


class FileReader:
    """An open file. It can be read to its end when it has no name any more. OSError when it is not there or cannot be
    read, WireError when it is no such file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = os.open(path, os.O_RDONLY)
        try:
            self._start, self.metadata, self._entries = self._header()
        except BaseException:
            self.close()
            raise

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def nbytes(self, name: str) -> int:
        """Of one that is there."""
        start, stop = self._entry(name).data_offsets
        return stop - start

    def read(self, name: str, into: Array) -> Array:
        """Fill ``into`` (uint8, of :meth:`nbytes`) with its bytes."""
        start, stop = self._entry(name).data_offsets
        if stop - start != len(into):
            raise self._damaged(f"has {stop - start} bytes of {name}, which takes {len(into)}")
        left, at = into.data, self._start + start
        while len(left):
            count = os.preadv(self._file, [left], at)
            if not count:
                raise self._damaged(f"ends in the middle of {name}")
            left, at = left[count:], at + count
        return into

    def array(self, name: str, dtype: str) -> Array:
        """All of it, as items of ``dtype``."""
        data: Array = self.read(name, np.empty(self.nbytes(name), np.uint8)).view(dtype)
        return data

    def kind(self, name: str) -> str:
        """The format's name of its dtype."""
        return self._entry(name).dtype

    def forget(self) -> None:
        """Have the system read from the disk what is read next, rather than give what it remembers."""
        os.posix_fadvise(self._file, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Twice is fine."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _entry(self, name: str) -> _Entry:
        if name not in self._entries:
            raise self._damaged(f"lacks {name}")
        return self._entries[name]

    def _header(self) -> tuple[int, dict[str, str], dict[str, _Entry]]:
        size = int.from_bytes(os.pread(self._file, _LENGTH, 0), "little")
        data = os.pread(self._file, size, _LENGTH) if size <= _LARGEST_HEADER else b""
        try:
            header: dict[str, Any] = msgspec.json.decode(data, type=dict[str, Any])
            metadata = msgspec.convert(header.pop(_METADATA), dict[str, str])
            return _LENGTH + size, metadata, msgspec.convert(header, dict[str, _Entry])
        except (msgspec.DecodeError, KeyError) as error:
            raise self._damaged(f"has no header that can be read: {error}") from error

    def _damaged(self, how: str) -> WireError:
        return WireError(f"{self.path} {how}", fix="check the disk, and whether something else writes there")


def _write(file: int, data: memoryview, at: int) -> None:
    while len(data):
        written = os.pwrite(file, data, at)
        data, at = data[written:], at + written
