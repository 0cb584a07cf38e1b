"""Whether the storage units can keep what training needs at once."""

from __future__ import annotations

from headrace.config.schema import Job
from headrace.errors import StalenessError

SMALLEST_ROW = 31
"""Bytes of a row of two tokens, one asked and one answered: what its columns take at least."""


def check_room(job: Job) -> list[StalenessError]:
    """A batch is trained when all its rows are stored: where these cannot be, no matter how short, the run would wait
    for ever."""
    capacity, units = job.storage.capacity, job.storage.units
    for index, phase in enumerate(job.phases):
        rows = phase.batch.groups * phase.batch.group_size
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
