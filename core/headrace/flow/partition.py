"""How many instances each policy version gets, by the demand for it (the partition step of DORA, arXiv 2604.26256).

Places are counted in *seats*: an instance that hosts several versions at once has a seat for each. Plain rounding does
not do: demand (10, 10, 10) over 8 rounds to 9, and (1, 1, 30) to (0, 0, 8), which starves what must drain first.
"""

from __future__ import annotations

from collections.abc import Mapping


def partition(demand: Mapping[int, int], *, seats: int, instances: int) -> dict[int, int]:
    """Seats of each version with any demand, by largest remainder; at least one each, and at most ``instances``, as an
    instance hosts a version once. They add up to ``seats`` unless all versions are everywhere. With fewer seats than
    versions, the oldest have one each: the others wait for them. Ties go to the newer version."""
    versions = sorted(version for version, count in demand.items() if count > 0)
    if len(versions) >= seats:
        return {version: int(place < seats) for place, version in enumerate(versions)}
    fixed: dict[int, int] = {}
    while True:
        rest = seats - sum(fixed.values())
        free = {version: demand[version] for version in versions if version not in fixed}
        total = sum(free.values())
        few = {version: 1 for version, count in free.items() if rest * count < total}
        many = {version: instances for version, count in free.items() if rest * count > instances * total}
        if not few and not many:
            return dict(sorted({**fixed, **_largest_remainder(free, rest)}.items()))
        # Whichever side is further off is settled first, so that what is settled stays right.
        lacking = sum(total - rest * free[version] for version in few)
        beyond = sum(rest * free[version] - instances * total for version in many)
        fixed |= few if lacking >= beyond else many


def _largest_remainder(demand: Mapping[int, int], seats: int) -> dict[int, int]:
    total = sum(demand.values())
    shares = {version: divmod(seats * count, total) for version, count in demand.items()}
    left = seats - sum(whole for whole, _ in shares.values())
    first = sorted(shares, key=lambda version: (-shares[version][1], -version))
    return {version: whole + (version in first[:left]) for version, (whole, _) in shares.items()}
