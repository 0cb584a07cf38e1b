"""What receivers ask a publisher, and what it answers. ``id`` numbers the questions of one receiver."""

from __future__ import annotations

import msgspec

from headrace.contract import Array, WeightManifest


class AskManifest(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """Which tensors has ``version``?"""

    id: int
    version: int


class AskChunk(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """``size`` bytes from ``offset`` on of the manifest's tensor number ``tensor``."""

    id: int
    version: int
    tensor: int
    offset: int
    size: int


class GiveManifest(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """The answer to AskManifest."""

    id: int
    manifest: WeightManifest


class GiveChunk(msgspec.Struct, tag=3, array_like=True, frozen=True, eq=False):
    """The answer to AskChunk. ``checksum``: xxh3-64 of ``data`` (uint8)."""

    id: int
    checksum: int
    data: Array


class Refuse(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The version is not served, or the question makes no sense."""

    id: int
    reason: str


Question = AskManifest | AskChunk
Answer = GiveManifest | GiveChunk | Refuse
