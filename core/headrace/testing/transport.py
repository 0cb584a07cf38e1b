"""A weight transport of plain files: a version is a folder of tensors and a manifest, written last.

Invariant: a manifest that can be read describes tensors that are all there.
"""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from headrace.contract import (
    Array,
    TransportContext,
    WeightManifest,
    WeightPublisher,
    WeightReceiver,
    WeightSource,
    WeightTransport,
)
from headrace.errors import ContractError, DeadlineError, WireError
from headrace.testing.trouble import FakeSettings, Trouble
from headrace.wire import array_bytes, manifest_digest, tensor_checksum, tensor_info

MANIFEST = "manifest.json"
POLL = 0.005
"""Seconds between two looks for a publisher that is not there."""


class FakeWeightTransport(WeightTransport):
    """A piece of work is a publication, or one tensor fetched."""

    Settings = FakeSettings

    def publisher(self, context: TransportContext) -> WeightPublisher:
        return FakePublisher(Path(context.directory) / f"{context.name}-weights", self.settings)

    def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
        return FakeReceiver(Path(address), self.settings)


class FakePublisher(WeightPublisher):
    """Serves while its folder exists."""

    def __init__(self, folder: Path, settings: FakeSettings) -> None:
        self._folder = folder
        self._trouble = Trouble(settings, error=WireError)
        folder.mkdir(parents=True)

    def publish(self, version: int, source: WeightSource) -> WeightManifest:
        self._trouble.work("publishing weights")
        folder = self._folder / str(version)
        if folder.exists():
            raise ContractError(f"version {version} was published before", fix="publish every version once")
        tensors = [(name, np.array(tensor, order="C")) for name, tensor in source.tensors()]
        twice = [name for name, count in Counter(name for name, _ in tensors).items() if count > 1]
        if twice:
            raise ContractError(f"the weight source of version {version} gave {twice} more than once")
        infos = tuple(tensor_info(name, tensor) for name, tensor in tensors)
        manifest = WeightManifest(
            version=version, tensors=infos, nbytes=sum(t.nbytes for _, t in tensors), digest=manifest_digest(infos)
        )
        folder.mkdir()
        for number, (_, tensor) in enumerate(tensors):
            (folder / str(number)).write_bytes(array_bytes(tensor))
        partial = folder / "partial"
        partial.write_bytes(msgspec.json.encode(manifest))
        partial.rename(folder / MANIFEST)
        return manifest

    def retire(self, version: int) -> None:
        shutil.rmtree(self._folder / str(version), ignore_errors=True)

    def address(self) -> str:
        return str(self._folder)

    def close(self) -> None:
        shutil.rmtree(self._folder, ignore_errors=True)


class FakeReceiver(WeightReceiver):
    """Reads the publisher's folder."""

    def __init__(self, folder: Path, settings: FakeSettings) -> None:
        self._folder = folder
        self._trouble = Trouble(settings, error=WireError)

    def manifest(self, version: int, *, deadline: float) -> WeightManifest:
        self._await_publisher(deadline, f"the manifest of version {version}")
        try:
            data = (self._folder / str(version) / MANIFEST).read_bytes()
        except FileNotFoundError:
            raise WireError(f"version {version} is not served by {self._folder}") from None
        return msgspec.json.decode(data, type=WeightManifest)

    def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
        for number, info in enumerate(manifest.tensors):
            self._trouble.work("fetching a tensor")
            what = f"tensor {info.name} of version {manifest.version}"
            self._await_publisher(deadline, what)
            try:
                data = bytearray((self._folder / str(manifest.version) / str(number)).read_bytes())
            except FileNotFoundError:
                raise WireError(f"{what}: version {manifest.version} is not served any more") from None
            tensor: Array = np.frombuffer(self._received(data), np.dtype(info.dtype)).reshape(info.shape)
            self._verify(tensor, info.checksum, what)
            yield info.name, tensor

    def close(self) -> None:
        """Nothing is held."""

    def _received(self, data: bytearray) -> bytearray:
        """What the way makes of a tensor's bytes."""
        return data

    def _verify(self, tensor: Array, checksum: str, what: str) -> None:
        if tensor_checksum(tensor) != checksum:
            raise WireError(f"{what}: its bytes do not have the manifest's checksum", fix="check the disk")

    def _await_publisher(self, deadline: float, what: str) -> None:
        end = time.monotonic() + deadline
        while not self._folder.is_dir():
            if time.monotonic() > end:
                raise DeadlineError(
                    f"no publisher at {self._folder} in {deadline:g} s, awaiting {what}",
                    fix="see whether the trainer's node lives",
                )
            time.sleep(POLL)
