"""Weights by a collective of torch.distributed, over gloo: one broadcast per version to all engines that want it.

On one host members meet in the run's private directory and talk over the loopback interface. Across hosts gloo's
connections have neither keys nor encryption: for a network that nobody else is on.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from headrace.contract import TransportCapabilities, TransportContext, WeightPublisher, WeightReceiver, WeightTransport
from headrace.wire import Keys, Network

_WINDOW = 4
"""Chunks on the way at a time, where a round broke."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveSettings:
    """The same for all members."""

    bucket_bytes: int = 8 << 20
    """Sent at a time."""
    silent_seconds: float = 20.0
    """A group one of whose members is silent for so long is given up."""

    def __post_init__(self) -> None:
        if self.bucket_bytes < 1:
            raise ValueError(f"bucket_bytes must be at least 1, got {self.bucket_bytes}")
        if not self.silent_seconds > 0:
            raise ValueError(f"silent_seconds must be above 0, got {self.silent_seconds}")


class CollectiveTransport(WeightTransport):
    """Makes the two sides. torch is imported where they are."""

    Settings = CollectiveSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.settings: CollectiveSettings = settings

    @classmethod
    def capabilities(cls, settings: CollectiveSettings) -> TransportCapabilities:
        """Copied by the publisher, and sent, whose two copies gloo makes side by side."""
        return TransportCapabilities(across_machines=True, copies=3)

    def publisher(self, context: TransportContext) -> WeightPublisher:
        from headrace_weights.collective.group import Meeting
        from headrace_weights.collective.publisher import CollectivePublisher

        network = _network(context)
        path = os.path.join(os.path.abspath(context.directory), f"{context.name}-groups")
        where = path if context.host is None else f"{context.host}:0"
        meeting = Meeting(where, serve=True, seconds=self.settings.silent_seconds)
        address = network.address(f"{context.name}-weights")
        return CollectivePublisher(address, meeting, bucket_bytes=self.settings.bucket_bytes, keys=network.keys)

    def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
        from headrace_weights.collective.receiver import CollectiveReceiver

        return CollectiveReceiver(
            address,
            bucket_bytes=self.settings.bucket_bytes,
            seconds=self.settings.silent_seconds,
            window=_WINDOW,
            keys=_network(context).keys,
        )


def _network(context: TransportContext) -> Network:
    keys = None if context.keys is None else Keys.from_dict(context.keys)
    return Network(directory=context.directory, host=context.host, keys=keys)
