"""The trainer's side: writes each version as a file, and an index of those that are served.

Invariant: every file that the index names is there and whole. It is replaced after a version's file was written, and
before one is removed.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import msgspec
import numpy as np

from headrace.contract import Array, TensorInfo, WeightManifest, WeightPublisher, WeightSource
from headrace.errors import RunError
from headrace.wire import OwnDirectory, array_bytes, tensor_info, write_private
from headrace_weights.disk.deltas import encode
from headrace_weights.disk.files import FileReader, FileWriter
from headrace_weights.tensors import dtype_of, gather, published_before

INDEX = "served.json"
MANIFEST = "headrace.manifest"
SCHEME = "file://"


class Served(msgspec.Struct):
    """One version's file and, when it tells only what differs, the file of all tensors that it differs from."""

    file: str
    base: str = ""


class _Base:
    """The last file of all tensors, to compare with. One buffer is used for all of its tensors."""

    def __init__(self, path: Path, manifest: WeightManifest) -> None:
        self.name = path.name
        self._file = FileReader(path)
        self._infos = {info.name: info for info in manifest.tensors}
        self._buffer = np.empty(0, np.uint8)

    def bytes_of(self, info: TensorInfo) -> Array | None:
        """None when it has no such tensor. Overwritten by the next call."""
        known = self._infos.get(info.name)
        if known is None or (known.dtype, known.shape) != (info.dtype, info.shape):
            return None
        nbytes = self._file.nbytes(info.name)
        if nbytes > len(self._buffer):
            self._buffer = np.empty(nbytes, np.uint8)
        return self._file.read(info.name, self._buffer[:nbytes])

    def unchanged(self, info: TensorInfo) -> bool:
        """Whether it has the very same tensor."""
        return self._infos.get(info.name) == info

    def close(self) -> None:
        self._file.close()


class DiskPublisher(WeightPublisher):
    """Has a directory of its own in ``folder`` until it is closed; that of one that was killed is removed by the next
    one on this host. Every ``full_every``-th version is written with all of its tensors."""

    def __init__(self, folder: str, *, full_every: int) -> None:
        # By the host's name, too: whether another host's process lives, a shared folder does not say for sure.
        self._own = OwnDirectory(folder, f"headrace-weights-{socket.gethostname()}-")
        self._home = Path(self._own.path)
        self._full_every = full_every
        self._served: dict[int, Served] = {}
        self._base: _Base | None = None
        self._since_full = 0
        self._reserve = {"full": 0, "delta": 0}
        """Bytes of the last header of each kind."""
        self._write_index()

    def publish(self, version: int, source: WeightSource) -> WeightManifest:
        if version in self._served:
            raise published_before(version)
        full = self._base is None or self._since_full + 1 >= self._full_every
        with self._writing(f"version {version}"):
            manifest = self._write(version, source, "full" if full else "delta")
            try:
                self._write_index()
            except OSError:  # told by the context
                del self._served[version]
                raise
        return manifest

    def retire(self, version: int) -> None:
        gone = self._served.pop(version, None)
        if gone is None:
            return
        with self._writing("the index"):
            self._write_index()
        needed = {name for served in self._served.values() for name in (served.file, served.base)}
        if self._base is not None:
            needed.add(self._base.name)  # what comes next differs from it
        for name in {gone.file, gone.base} - {""} - needed:
            (self._home / name).unlink(missing_ok=True)

    def address(self) -> str:
        return f"{SCHEME}{self._home}"

    def close(self) -> None:
        self._served.clear()
        if self._base is not None:
            self._base.close()
            self._base = None
        self._own.close()

    def _write(self, version: int, source: WeightSource, kind: str) -> WeightManifest:
        base = self._base if kind == "delta" else None
        path = self._home / (f"{version}.safetensors" if base is None else f"{version}-{base.name}")
        writer = FileWriter(path, reserve=self._reserve[kind])
        numbers = count()

        def keep(name: str, tensor: Array) -> TensorInfo:
            whole = np.ascontiguousarray(tensor).reshape(tensor.shape)
            info, number = tensor_info(name, whole), next(numbers)
            if base is None:
                writer.add(name, whole)
            elif not base.unchanged(info):
                for part, array in _parts(number, info, whole, base):
                    writer.add(part, array)
            return info

        try:
            manifest = gather(version, source, keep)
            text = msgspec.json.encode(manifest).decode()
            self._reserve[kind] = writer.commit({"format": "pt", MANIFEST: text})
        except BaseException:  # whatever the source raises; raised again
            writer.discard()
            raise
        self._served[version] = Served(path.name, "" if base is None else base.name)
        self._since_full += 1
        if base is None:
            self._rebase(path, manifest)
        return manifest

    @contextmanager
    def _writing(self, what: str) -> Iterator[None]:
        """What the disk refuses becomes a RunError."""
        try:
            yield
        except OSError as error:
            raise RunError(
                f"{what} cannot be written to {self._home}: {error.strerror}",
                fix="free space there, or name another folder with weights.path",
            ) from error

    def _rebase(self, path: Path, manifest: WeightManifest) -> None:
        old, self._base, self._since_full = self._base, _Base(path, manifest), 0
        if old is not None:
            old.close()
            if all(old.name not in (served.file, served.base) for served in self._served.values()):
                (self._home / old.name).unlink(missing_ok=True)

    def _write_index(self) -> None:
        hidden = self._home / f".{INDEX}"
        write_private(hidden, msgspec.json.encode(self._served))
        os.replace(hidden, self._home / INDEX)


def _parts(number: int, info: TensorInfo, tensor: Array, base: _Base) -> list[tuple[str, Array]]:
    """What differs from the base; all of it where that has no such tensor."""
    data: Array = np.frombuffer(array_bytes(tensor), np.uint8)
    old = base.bytes_of(info)
    return [(f"{number}.whole", data)] if old is None else list(encode(number, data, old, dtype_of(info).itemsize))
