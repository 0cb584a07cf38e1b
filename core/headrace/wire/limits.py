"""Bounds of one message and one queue: what a peer may make this process hold."""

from __future__ import annotations

from dataclasses import dataclass

MIB = 1 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """A message over a bound is refused and counted; the peer and the process live on."""

    header_bytes: int = 64 * MIB
    """The msgpack header: everything but arrays."""
    frame_bytes: int = 2048 * MIB
    """One array. A frame over twice this is not even read: the connection is cut."""
    frames: int = 4096
    """Arrays in a message."""
    queue: int = 100_000
    """Messages waiting per peer and direction."""

    def __post_init__(self) -> None:
        for name in ("header_bytes", "frame_bytes", "frames", "queue"):
            if getattr(self, name) < 1:
                raise ValueError(f"Limits.{name} must be at least 1, got {getattr(self, name)}")


DEFAULT_LIMITS = Limits()
