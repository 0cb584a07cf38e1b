"""Seeds derived from names: independent of worker layout and completion order."""

from __future__ import annotations

import xxhash


def derive_seed(base: int, *parts: int | str) -> int:
    """A seed in [0, 2**63) that depends on ``base`` and every part, and on nothing else."""
    text = "/".join(str(part) for part in (base, *parts))
    return xxhash.xxh3_64_intdigest(text.encode()) >> 1
