"""A file of messages that is whole, or is not there under its name.

Each record is its size (8 bytes, little endian), the xxh3-128 of all that came before and of its frames, and the
frames; an empty record is the last. Written under a hidden name, synced, renamed. Invariant: one that was cut,
continued or changed by a bit is refused, and so is one whose records are not in their order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import msgspec
import xxhash

from headrace.errors import RunError
from headrace.wire.codec import encode

MAGIC = b"headrace records 1\n"
_SIZE, _DIGEST = 8, 16


class RecordWriter:
    """Of the file ``path``. OSError when the disk refuses it; then nothing has the name."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._hidden = path.with_name(f".{path.name}.partial")
        self._digest = b""
        self._file = self._hidden.open("wb")
        self._file.write(MAGIC)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        with suppress(OSError):  # what a full disk did not take it does not take now either
            self._file.close()
        self._hidden.unlink(missing_ok=True)

    def write(self, value: object) -> None:
        """One more record."""
        self._append(msgspec.msgpack.encode([bytes(frame) for frame in encode(value)]))

    def commit(self) -> None:
        """It is whole, and on disk: a machine that loses power keeps what has its name."""
        self._append(b"")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        self._hidden.replace(self._path)
        sync(self._path.parent)

    def _append(self, frames: bytes) -> None:
        self._digest = xxhash.xxh3_128_digest(self._digest + frames)
        self._file.write(len(frames).to_bytes(_SIZE, "little") + self._digest)
        self._file.write(frames)


def read_records(path: Path) -> Iterator[list[Any]]:
    """The frames of each record, for :func:`headrace.wire.decode`, as they are read: of a file that must not be used in
    part, read all first. RunError for one that is not whole."""
    digest = b""
    try:
        with open(path, "rb") as file:
            if file.read(len(MAGIC)) != MAGIC:
                raise _damaged(path, "is no file of records")
            while True:
                head = file.read(_SIZE + _DIGEST)
                size = int.from_bytes(head[:_SIZE], "little")
                frames = file.read(size) if size <= os.fstat(file.fileno()).st_size else b""
                digest = xxhash.xxh3_128_digest(digest + frames)
                if len(frames) != size or head[_SIZE:] != digest:
                    raise _damaged(path, f"is damaged or cut before byte {file.tell()}")
                if not frames:
                    break
                yield msgspec.msgpack.decode(frames, type=list[memoryview])
            if file.read(1):
                raise _damaged(path, "goes on after its end")
    except OSError as error:
        raise RunError(
            f"{path} cannot be read: {error.strerror}",
            origin=str(path),
            fix="name a file that is there, and that this user may read",
        ) from error


def sync(path: Path) -> None:
    """On disk, not only on its way: a machine that loses power keeps what had its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _damaged(path: Path, how: str) -> RunError:
    return RunError(f"{path} {how}", origin=str(path), fix="use an older one, or a copy of it")
