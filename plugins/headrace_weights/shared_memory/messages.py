"""What a receiver says to a publisher, and what that answers.

Every message is one datagram of a few bytes. What has more is in a file that is handed over with it. A receiver asks
one question at a time, and over a new connection after one that was not answered.
"""

from __future__ import annotations

import msgspec

MESSAGE_BYTES = 4096


class AskManifest(msgspec.Struct, tag=0, array_like=True, frozen=True):
    """Which tensors has ``version``?"""

    version: int


class AskSegment(msgspec.Struct, tag=1, array_like=True, frozen=True):
    """Where are the values of ``version``? The answer begins a lease."""

    version: int


class Release(msgspec.Struct, tag=2, array_like=True, frozen=True):
    """One lease has ended: nobody reads the segment by it any more."""

    segment: int


class GiveManifest(msgspec.Struct, tag=3, array_like=True, frozen=True):
    """The answer to AskManifest, with a file of ``nbytes``: a WeightManifest as msgpack."""

    nbytes: int


class GiveSegment(msgspec.Struct, tag=4, array_like=True, frozen=True):
    """The answer to AskSegment, with the segment's file. ``kept``: the numbers of all that still exist."""

    segment: int
    nbytes: int
    kept: tuple[int, ...]


class Refuse(msgspec.Struct, tag=5, array_like=True, frozen=True):
    """The version is not served."""

    reason: str


Question = AskManifest | AskSegment
Said = Question | Release
Answer = GiveManifest | GiveSegment | Refuse

encode = msgspec.msgpack.Encoder().encode
decode_said = msgspec.msgpack.Decoder(Said).decode
decode_answer = msgspec.msgpack.Decoder(Answer).decode
