"""An engine's side: reads a version's file, and the one that it differs from.

Invariant: what is put together of two files has the checksum of the version's manifest, whatever is wrong with either.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from headrace.contract import Array, TensorInfo, WeightManifest, WeightReceiver
from headrace.errors import DeadlineError, WireError
from headrace_weights.disk.deltas import apply
from headrace_weights.disk.files import FileReader
from headrace_weights.disk.publisher import INDEX, MANIFEST, SCHEME, Served
from headrace_weights.memory import Buffers
from headrace_weights.tensors import checked_manifest, dtype_of, nbytes_of, typed

_LOOK_SECONDS = 0.02
"""Between two looks for files that are not there yet: a network file system shows them late."""
_SPARE_BYTES = 64 << 20
_READS = 3
"""A tensor is read this often before it counts as damaged."""


class DiskReceiver(WeightReceiver):
    """Of one publisher's directory, as it is mounted here."""

    def __init__(self, address: str) -> None:
        self._home = Path(address.removeprefix(SCHEME))
        self._buffers = Buffers(_SPARE_BYTES)

    def manifest(self, version: int, *, deadline: float) -> WeightManifest:
        with self._opened(version, deadline) as (own, _):
            try:
                found = msgspec.json.decode(own.metadata[MANIFEST], type=WeightManifest)
            except (KeyError, msgspec.DecodeError) as error:
                raise WireError(f"{own.path} has no manifest that can be read: {error}") from error
        return checked_manifest(found, version, str(self._home))

    def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
        with self._opened(manifest.version, deadline) as (own, base):
            for number, info in enumerate(manifest.tensors):
                yield info.name, self._tensor(number, info, own, base)

    def close(self) -> None:
        """Nothing is held."""

    def _tensor(self, number: int, info: TensorInfo, own: FileReader, base: FileReader | None) -> Array:
        what = f"tensor {info.name} of {own.path}"
        for left in reversed(range(_READS)):
            data = self._buffers.take(nbytes_of(info))
            try:
                if base is None:
                    own.read(info.name, data)
                elif (whole := f"{number}.whole") in own:
                    own.read(whole, data)
                else:
                    apply(own, number, base.read(info.name, data), dtype_of(info).itemsize)
                return typed(info, data, what)
            except OSError as error:
                raise WireError(f"{what} cannot be read any more: {error.strerror}") from error
            except WireError:
                if not left:
                    raise
            for file in (own, base):
                if file is not None:
                    file.forget()
        raise AssertionError("the last read returns or raises")

    @contextmanager
    def _opened(self, version: int, deadline: float) -> Iterator[tuple[FileReader, FileReader | None]]:
        """The version's file, and the one that it differs from where there is one."""
        own, base = self._open(version, deadline)
        try:
            yield own, base
        finally:
            own.close()
            if base is not None:
                base.close()

    def _open(self, version: int, deadline: float) -> tuple[FileReader, FileReader | None]:
        end = time.monotonic() + deadline
        while True:
            try:
                served = msgspec.json.decode((self._home / INDEX).read_bytes(), type=dict[int, Served])
                if version not in served:
                    raise WireError(f"version {version} is not served by {self._home}; versions {sorted(served)} are")
                return self._files(served[version])
            except msgspec.DecodeError as error:
                raise WireError(f"{self._home / INDEX} cannot be read: {error}") from error
            except OSError as error:  # not there yet, retired this moment, or nobody publishes there any more
                if time.monotonic() > end:
                    raise DeadlineError(
                        f"no version {version} at {self._home} in {deadline:g} s: {error.strerror}",
                        fix="see whether the trainer's node lives, and whether this machine has the folder",
                    ) from error
            time.sleep(_LOOK_SECONDS)

    def _files(self, served: Served) -> tuple[FileReader, FileReader | None]:
        own = FileReader(self._home / served.file)
        try:
            return own, FileReader(self._home / served.base) if served.base else None
        except BaseException:
            own.close()
            raise
