"""What several test folders share: one compute thread, patient property tests, a small job."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before anything imports a tensor library

settings.register_profile("headrace", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("headrace")

SMALL_PLUGINS = Path(__file__).parent / "small_plugins.py"

SMALL_JOB = f"""\
observers = []

[job]
name = "small"
steps = 10

[model.scratch]
layers = 1

[environment]
use = "{SMALL_PLUGINS}:Sums"
largest = 9

[rollout]
use = "{SMALL_PLUGINS}:Engine"
max_new_tokens = 8

[trainer]
use = "{SMALL_PLUGINS}:Trainer"
learning_rate = 0.1

[algorithm]
use = "{SMALL_PLUGINS}:Relative"

[batch]
groups = 8
group_size = 4
mini_batches = 2

[staleness]
policy = "{SMALL_PLUGINS}:Bounded"
max_staleness = 1

[storage]
use = "{SMALL_PLUGINS}:Dictionary"

[weights]
use = "{SMALL_PLUGINS}:Transport"

[launcher]
use = "{SMALL_PLUGINS}:Starter"
"""
"""A job of plugins that declare and start nothing; every table's first line is known to the tests by its text."""


@pytest.fixture
def write_job(tmp_path: Path) -> Callable[..., Path]:
    """Write the small job with ``(old, new)`` replacements and ``extra`` text at its end; the file."""

    def write(*replacements: tuple[str, str], extra: str = "", name: str = "small.toml") -> Path:
        text = SMALL_JOB
        for old, new in replacements:
            assert old in text, f"the small job has no {old!r}"
            text = text.replace(old, new)
        path = tmp_path / name
        path.write_text(text + extra)
        return path

    return write


@pytest.fixture
def errors_of(write_job: Callable[..., Path]) -> Callable[..., list[str]]:
    """Load and check the small job, changed as by ``write_job``; what a person reads, one text per error."""
    from headrace.config import JobErrors, check_job, load_job
    from headrace.errors import ConfigError

    def errors(*replacements: tuple[str, str], extra: str = "", overrides: Sequence[str] = ()) -> list[str]:
        try:
            job = load_job(write_job(*replacements, extra=extra), overrides)
        except JobErrors as several:
            return [f"{type(error).__name__}: {error}" for error in several.errors]
        except ConfigError as error:
            return [f"ConfigError: {error}"]
        return [str(finding) for finding in check_job(job) if finding.severity == "error"]

    return errors
