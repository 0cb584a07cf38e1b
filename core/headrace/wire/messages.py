"""What travels between a client and a server. ``id`` numbers the calls of one client."""

from __future__ import annotations

from typing import Annotated, Generic, TypeVar

import msgspec

from headrace.errors import ContractError

MAX_SECONDS = 2_000_000
"""23 days. Bounds a deadline by what a socket can wait, and keeps NaN and infinity out of the loop's timers."""


def check_deadline(seconds: float) -> None:
    """ContractError for what is no time within which an answer can come."""
    try:
        possible = 0 < seconds <= MAX_SECONDS
    except TypeError:
        possible = False
    if not possible:
        raise ContractError(
            f"a deadline is a number of seconds above 0 and at most {MAX_SECONDS:,}, got {seconds!r}",
            fix="say how long is too long: nothing waits for ever",
        )


Body = TypeVar("Body")
"""What is asked or answered when it is sent; as it is received, :class:`msgspec.Raw`: its type is looked up first."""


SILENCE_FIX = "see whether its process still runs, and what it is busy with"


class Call(msgspec.Struct, Generic[Body], array_like=True, tag=0, frozen=True):
    """Client → server. ``seconds``: how long the caller waits; the handler is cancelled then."""

    id: int
    method: str
    seconds: Annotated[float, msgspec.Meta(gt=0, le=MAX_SECONDS)]
    body: Body


class Cancel(msgspec.Struct, array_like=True, tag=1, frozen=True):
    """Client → server: nobody waits for this call any more."""

    id: int


class Reply(msgspec.Struct, Generic[Body], array_like=True, tag=2, frozen=True):
    """Server → client."""

    id: int
    body: Body


class Failure(msgspec.Struct, array_like=True, tag=3, frozen=True):
    """Server → client: the handler raised, or the call was refused. ``kind``: a class of headrace.errors."""

    id: int
    kind: str
    message: str
    origin: str
    fix: str
