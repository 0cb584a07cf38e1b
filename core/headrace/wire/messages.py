"""What travels between a client and a server. ``id`` numbers the calls of one client."""

from __future__ import annotations

from typing import Annotated

import msgspec

MAX_SECONDS = 1e9
"""Bounds a deadline, and keeps NaN and infinity out of the loop's timers."""


class Call(msgspec.Struct, array_like=True, tag=0, frozen=True):
    """Client → server. ``seconds``: how long the caller waits; the handler is cancelled then."""

    id: int
    method: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
    body: msgspec.Raw


class Cancel(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Client → server: nobody waits for this call any more."""

    id: int


class Reply(msgspec.Struct, array_like=True, tag=2, frozen=True):
    """Server → client."""

    id: int
    body: msgspec.Raw


class Failure(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Server → client: the handler raised, or the call was refused. ``kind``: a class of headrace.errors."""

    id: int
    kind: str
    message: str
    origin: str
    fix: str
