"""Small jobs run as a user runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from support.small_job import Run, SmallJob, small_job


@pytest.fixture
def job(tmp_path: Path) -> Iterator[SmallJob]:
    with small_job(tmp_path) as job:
        yield job


@pytest.fixture
def start(job: SmallJob) -> Callable[..., Run]:
    """Start the small job with overrides."""
    return job.start


@pytest.fixture
def resume(job: SmallJob) -> Callable[[Run], Run]:
    """Continue a run in its place."""
    return job.resume
