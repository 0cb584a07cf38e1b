"""Whether the storage units can keep what training needs at once."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.config.schema import Job
from headrace.contract import AlgorithmNeeds
from headrace.errors import StalenessError

SMALLEST_ROW = 31
"""Bytes of a row of two tokens, one asked and one answered: what its columns take at least."""


def check_room(job: Job, needs: Sequence[AlgorithmNeeds | None]) -> list[StalenessError]:
    """A batch is trained when all its rows are stored: where these cannot be, no matter how short, the run would wait
    for ever. ``needs``: of each phase's algorithm, None where unknown."""
    capacity, units = job.storage.capacity, job.storage.units
    for index, (phase, need) in enumerate(zip(job.phases, needs, strict=True)):
        greedy = need is not None and need.greedy_reward
        rows = phase.batch.groups * (phase.batch.group_size + greedy)
        if 0 < capacity * units < rows * SMALLEST_ROW:
            return [
                StalenessError(
                    f"storage cannot keep a batch: {units} x {capacity} bytes < {rows} rows x {SMALLEST_ROW} bytes of "
                    f"phase {phase.name!r}, where each row has two tokens; real ones have more",
                    origin=job.origin(
                        ("storage", "capacity"), ("phase", index, "batch", "groups"), ("batch", "groups")
                    ),
                    fix="raise storage.capacity above what the rows of a batch take, or leave it out for no bound",
                )
            ]
    return []
