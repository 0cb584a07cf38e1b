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


class AskRound(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """Which group is ``version`` sent to next? ``joiner`` is in it from now on, once, however often it asks."""

    id: int
    version: int
    joiner: str


class GiveRound(msgspec.Struct, tag=6, array_like=True, frozen=True):
    """The answer to AskRound. ``store``: where its members meet; ``key``: what they meet under; ``rank``: the joiner's
    own among them."""

    id: int
    store: str
    key: str
    rank: int


Question = AskManifest | AskChunk | AskRound
Given = GiveManifest | GiveChunk | GiveRound
Answer = Given | Refuse
