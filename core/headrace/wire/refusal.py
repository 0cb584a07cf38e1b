"""The refusal of a message: a WireError that carries a short reason, so that refusals can be counted.

What a caller has said wrong, and could have known, it hears as its own mistake: a ContractError.
"""

from __future__ import annotations

from headrace.errors import ContractError, HeadraceError, WireError

MALFORMED = "malformed"
WRONG_TYPE = "wrong type"
UNKNOWN_METHOD = "unknown method"
HEADER_TOO_LARGE = "header too large"
FRAME_TOO_LARGE = "frame too large"
TOO_MANY_FRAMES = "too many frames"
BAD_FRAME = "bad frame"
WRONG_KEY = "wrong key"
NO_HANDSHAKE = "no handshake"

_OF_WHAT_WAS_SAID = {WRONG_TYPE, HEADER_TOO_LARGE, FRAME_TOO_LARGE, TOO_MANY_FRAMES}


class RefusedError(WireError):
    """A message that is not as it must be. ``reason``: one of this module's words."""

    def __init__(self, message: str, *, reason: str, origin: str = "", fix: str = "") -> None:
        super().__init__(message, origin=origin, fix=fix)
        self.reason = reason


def to_caller(method: str, refusal: RefusedError) -> HeadraceError:
    """What whoever called ``method`` is told of a request that is refused."""
    kind = ContractError if refusal.reason in _OF_WHAT_WAS_SAID else WireError
    return kind(f"{method}: {refusal.message}", origin=refusal.origin, fix=refusal.fix)
