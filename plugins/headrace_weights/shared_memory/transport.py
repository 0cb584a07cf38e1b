"""Weights through memory that trainer and engines on one host share: one copy, whatever the number of engines.

The trainer writes a version once; engines map it and get views, whose checksums they verify. The memory of a version
that is retired is written to again when no engine has a view any more, and is the system's when trainer and engines are
gone, however they ended.
"""

from __future__ import annotations

from typing import Any

from headrace.contract import TransportCapabilities, TransportContext, WeightPublisher, WeightReceiver, WeightTransport
from headrace_weights.shared_memory.publisher import SharedMemoryPublisher
from headrace_weights.shared_memory.receiver import SharedMemoryReceiver


class SharedMemoryTransport(WeightTransport):
    """Makes the two sides."""

    @classmethod
    def capabilities(cls, settings: Any) -> TransportCapabilities:
        """Copied into the segment."""
        return TransportCapabilities(private=True, copies=1)

    def publisher(self, context: TransportContext) -> WeightPublisher:
        return SharedMemoryPublisher(context.directory, context.name)

    def receiver(self, context: TransportContext, address: str) -> WeightReceiver:
        return SharedMemoryReceiver(address)
