"""JSON lines on disk, written straight through and read back lazily.

Every line is handed to the operating system before the write returns, so a killed process loses nothing it
announced; what a dying machine may cut is the last line, which the reader tolerates and reports, and which a writer
that continues the file cuts off. Any other line that does not decode makes the file unusable: a log with a hole proves
nothing.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, Generic, Self, TypeVar

import msgspec
import numpy as np

from headrace.errors import RunError

T = TypeVar("T")

logger = logging.getLogger(__name__)


def _plain(value: Any) -> Any:
    """numpy scalars are numbers too."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


def _unreadable(path: str | Path, error: OSError) -> RunError:
    return RunError(
        f"cannot read {path}: {error.strerror}", fix="name a run directory; it holds events.jsonl and metrics.jsonl"
    )


def last_line(path: str | Path) -> bytes:
    """The last line that has its end; empty when none has. RunError when the file cannot be read."""
    try:
        with open(path, "rb") as file:
            return _last_line(file)[1]
    except OSError as error:
        raise _unreadable(path, error) from error


def _last_line(file: BinaryIO) -> tuple[int, bytes]:
    """Where the last whole line ends, and the line."""
    try:
        content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except ValueError:  # an empty file cannot be mapped
        return 0, b""
    with content:
        end = content.rfind(b"\n") + 1
        return end, content[content.rfind(b"\n", 0, max(0, end - 1)) + 1 : end]


def _cut_torn_line(path: Path) -> None:
    with open(path, "r+b") as file:
        size, (whole, _) = file.seek(0, 2), _last_line(file)
        if whole < size:
            logger.warning("%s ends in the middle of a line: its last %d bytes are cut off", path, size - whole)
            file.truncate(whole)


class RecordLog:
    """Appends records, one JSON line each, to a file that must not exist yet; with ``append``, after those it has: a
    torn last line is cut off then, with a warning. Used from one thread."""

    def __init__(self, path: str | Path, *, append: bool = False) -> None:
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        self._full: str | None = None
        try:
            if append and Path(path).exists():
                _cut_torn_line(Path(path))
            self._file = open(path, "ab" if append else "xb", buffering=0)  # noqa: SIM115  # closed by close()
        except FileExistsError as error:
            raise RunError(
                f"{path} exists; a log is written by one run only", fix="use a fresh run directory"
            ) from error
        except OSError as error:
            raise RunError(
                f"cannot create {path}: {error.strerror}", fix="check that the run directory exists and is writable"
            ) from error

    def write(self, record: Any) -> None:
        """Append one record; it is on its way to disk when this returns. Non-finite numbers become null. RunError
        when the file cannot take it, and from then on: a torn line in the middle would make the whole log unreadable,
        so nothing may follow it."""
        if self._full is not None:
            raise self._refused(self._full)
        line = self._encoder.encode(record) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise self._refused(error.strerror or "unknown") from error
        if written != len(line):
            raise self._refused(f"{written} of {len(line)} bytes were taken")

    def _refused(self, reason: str) -> RunError:
        self._full = reason
        self._file.close()
        return RunError(f"cannot write {self._file.name}: {reason}", fix="free disk space or move the run directory")

    def close(self) -> None:
        """May be called twice."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class LineReader(Generic[T]):
    """Iterates a file's records; afterwards ``cut_short`` tells whether an incomplete last line was left out."""

    def __init__(self, path: str | Path, decode: Callable[[bytes], T]) -> None:
        self.path = Path(path)
        self.cut_short = False
        self._decode = decode

    def __iter__(self) -> Iterator[T]:
        self.cut_short = False
        decode = self._decode
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    try:
                        record = decode(line)
                    except msgspec.DecodeError as error:
                        if not line.endswith(b"\n"):
                            self.cut_short = True
                            return
                        raise RunError(
                            f"line {number} does not read as a record of this log: {error}",
                            origin=f"{self.path}:{number}",
                            fix="a line that was cut or edited cannot be made good: put a whole copy of the file in "
                            "its place; one that another version of Headrace wrote is read with that version",
                        ) from error
                    yield record
        except OSError as error:
            raise _unreadable(self.path, error) from error
