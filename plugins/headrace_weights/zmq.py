"""Full tensors over ZeroMQ: receivers ask for chunks, the publisher serves them from host memory.

Receivers pull, so they may join, leave and come back at any time, and a slow one holds up nobody. What arrives does
not depend on chunk size or window. The publisher listens on an ipc socket of the run's private directory, or on a tcp
port that only holders of the run's keys can use.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from headrace.contract import TransportCapabilities, TransportContext, WeightPublisher, WeightReceiver, WeightTransport
from headrace.wire import Keys, Network
from headrace_weights.publisher import ZmqPublisher
from headrace_weights.receiver import ZmqReceiver


@dataclass(frozen=True, slots=True, kw_only=True)
class ZmqSettings:
    """Of the receiving side."""

    chunk_bytes: int = 8 << 20
    """Bytes asked for at a time."""
    window: int = 4
    """Chunks asked for and not yet received."""

    def __post_init__(self) -> None:
        if self.chunk_bytes < 1 or self.window < 1:
            raise ValueError(f"chunk_bytes and window must be at least 1, got {self.chunk_bytes} and {self.window}")


class ZmqTransport(WeightTransport):
    """Makes the two sides."""

    Settings = ZmqSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.settings: ZmqSettings = settings

    @classmethod
    def capabilities(cls, settings: ZmqSettings) -> TransportCapabilities:
        """Copied by the publisher, into the socket, out of it, and into the tensor."""
        return TransportCapabilities(across_machines=True, private=True, copies=4)

    def publisher(self, context: TransportContext) -> WeightPublisher:
        network = _network(context)
        return ZmqPublisher(network.address(f"{context.name}-weights"), keys=network.keys)

    def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
        settings, keys = self.settings, _network(context).keys
        return ZmqReceiver(address, keys=keys, chunk_bytes=settings.chunk_bytes, window=settings.window)


def _network(context: TransportContext) -> Network:
    keys = None if context.keys is None else Keys.from_dict(context.keys)
    return Network(directory=context.directory, host=context.host, keys=keys)
