"""JSON lines on disk, written straight through and read back lazily.

Every line is handed to the operating system before the write returns, so a killed process loses nothing it
announced; what a dying machine may cut is the last line, which the reader tolerates and reports. Any other line
that does not decode makes the file unusable: a log with a hole proves nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

import msgspec
import numpy as np

from headrace.errors import RunError

T = TypeVar("T")


def _plain(value: Any) -> Any:
    """numpy scalars are numbers too."""
    if isinstance(value, np.generic):
        return value.item()
    raise NotImplementedError(f"{type(value).__name__} is not JSON")


class RecordLog:
    """Appends records, one JSON line each, to a file that must not exist yet. Used from one thread."""

    def __init__(self, path: str | Path) -> None:
        self._encoder = msgspec.json.Encoder(enc_hook=_plain)
        try:
            self._file = open(path, "xb", buffering=0)  # noqa: SIM115  # closed by close()
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
        when the file cannot take it."""
        line = self._encoder.encode(record) + b"\n"
        try:
            written = self._file.write(line)
        except OSError as error:
            raise self._refused(error.strerror or "unknown") from error
        if written != len(line):
            raise self._refused(f"{written} of {len(line)} bytes were taken")

    def _refused(self, reason: str) -> RunError:
        # A torn line in the middle would make the whole log unreadable, so nothing may follow it.
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
                            fix="the file was edited or written by another version of Headrace: read it with that one",
                        ) from error
                    yield record
        except OSError as error:
            raise RunError(
                f"cannot read {self.path}: {error.strerror}",
                fix="name a run directory; it holds events.jsonl and metrics.jsonl",
            ) from error
