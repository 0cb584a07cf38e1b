"""The ``weight_transport`` role: how a policy version travels from a trainer to engines.

The publishing side keeps every version that has not been retired, so that an engine which starts or
restarts late can still fetch it. Both sides are called off the event loop, one call at a time per object.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.contract.columns import Array
from headrace.contract.plugin import Plugin


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorInfo:
    """One tensor of a version."""

    name: str
    """Hugging Face name."""
    dtype: str
    """numpy or ml_dtypes name, for example ``bfloat16``."""
    shape: tuple[int, ...]
    checksum: str
    """xxh3-128 of the tensor's bytes in C order, hexadecimal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightManifest:
    """All of a version's tensors, without their values."""

    version: int
    tensors: tuple[TensorInfo, ...]
    nbytes: int
    digest: str
    """Over names, shapes, dtypes and checksums, independent of the version number."""


class WeightSource(ABC):
    """A trainer's current weights, read once, in a fixed order."""

    base: WeightSource | None = None
    """Those of the tensors that no step changes: the same object in every source for as long as they are the same, so
    that a transport need read them once. None: any may change."""

    @abstractmethod
    def tensors(self) -> Iterator[tuple[str, Array]]:
        """Full tensors under their Hugging Face names; tied tensors once. The arrays may be views that the next
        optimiser step changes: a transport copies what it keeps."""

    def changing(self) -> Iterator[tuple[str, Array]]:
        """Those of :meth:`tensors` that are not of the base."""
        kept = {name for name, _ in self.base.tensors()} if self.base is not None else set()
        return ((name, tensor) for name, tensor in self.tensors() if name not in kept)


class WeightPublisher(ABC):
    """The trainer's side."""

    @abstractmethod
    def publish(self, version: int, source: WeightSource) -> WeightManifest:
        """Copy the source and serve it as ``version``. Publishing a version twice is a ContractError."""

    @abstractmethod
    def retire(self, version: int) -> None:
        """Stop serving a version and free it; an unknown one is ignored."""

    @abstractmethod
    def address(self) -> str:
        """What receivers connect to."""

    @abstractmethod
    def close(self) -> None:
        """Stop serving; may be called twice."""


class WeightReceiver(ABC):
    """An engine's side."""

    @abstractmethod
    def manifest(self, version: int, *, deadline: float) -> WeightManifest:
        """``deadline``: seconds. WireError when the version is not served, DeadlineError when nobody answers."""

    @abstractmethod
    def fetch(self, manifest: WeightManifest, *, deadline: float) -> Iterator[tuple[str, Array]]:
        """Every tensor, verified by checksum; a corrupt or lost chunk is asked for again, and WireError raised
        when that does not help. ``deadline``: seconds without progress."""

    def fetch_some(
        self, manifest: WeightManifest, names: Collection[str], *, deadline: float
    ) -> Iterator[tuple[str, Array]]:
        """As :meth:`fetch`, the tensors of these names alone. A receiver that can leaves the others where they are."""
        fetched = self.fetch(manifest, deadline=deadline)
        return ((name, tensor) for name, tensor in fetched if name in names)

    @abstractmethod
    def close(self) -> None:
        """May be called twice."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportContext:
    """Where a transport may open its sockets."""

    directory: str
    """Private directory (mode 0700) for ipc sockets of this run."""
    name: str
    """This node's name."""
    host: str | None = None
    """Address of this machine to serve tcp at; None: ipc only."""
    keys: Mapping[str, str] | None = field(default=None, repr=False)
    """The run's CURVE keys, as Z85 text: ``server_public``, ``server_secret``, ``client_public``, ``client_secret``.
    Given whenever ``host`` is: nobody without them may read a weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TransportCapabilities:
    """What a transport with given settings can do; read before anything starts."""

    across_machines: bool = False
    """Trainer and engines may be on different ones."""
    private: bool = False
    """Nobody can read or change weights on the way but this user and, between machines, holders of the run's keys."""
    copies: int | None = None
    """How often a version's bytes are copied or sent from the source to what one engine is handed. A job that names no
    transport gets the one with the fewest that fits it; None: only a job that names this one gets it."""


class WeightTransport(Plugin, ABC):
    """Makes the two sides."""

    @classmethod
    def capabilities(cls, settings: Any) -> TransportCapabilities:
        """Answered without importing a tensor library."""
        return TransportCapabilities()

    @abstractmethod
    def publisher(self, context: TransportContext) -> WeightPublisher:
        """Start serving."""

    @abstractmethod
    def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
        """Connect to a publisher's ``address``."""
