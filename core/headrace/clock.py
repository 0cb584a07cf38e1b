"""The time of day for what is written down. Deadlines are of ``time.monotonic``.

Invariant: in a process no time is before one that was told earlier, however the system's clock is set meanwhile: the
difference of two is a duration.
"""

from __future__ import annotations

import time

_AHEAD = time.time() - time.monotonic()


def now() -> float:
    """Unix seconds."""
    return _AHEAD + time.monotonic()
