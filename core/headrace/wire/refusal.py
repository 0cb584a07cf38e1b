"""The refusal of a message: a WireError that carries a short reason, so that refusals can be counted."""

from __future__ import annotations

from headrace.errors import WireError

MALFORMED = "malformed"
WRONG_TYPE = "wrong type"
UNKNOWN_METHOD = "unknown method"
HEADER_TOO_LARGE = "header too large"
FRAME_TOO_LARGE = "frame too large"
TOO_MANY_FRAMES = "too many frames"
BAD_FRAME = "bad frame"
WRONG_KEY = "wrong key"
NO_HANDSHAKE = "no handshake"


class RefusedError(WireError):
    """A message that is not as it must be. ``reason``: one of this module's words."""

    def __init__(self, message: str, *, reason: str, origin: str = "", fix: str = "") -> None:
        super().__init__(message, origin=origin, fix=fix)
        self.reason = reason
