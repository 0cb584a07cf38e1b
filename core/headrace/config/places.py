"""Whether a run can have its directory, found out by making another beside it that is gone at once."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from headrace.config.schema import Job
from headrace.errors import ConfigError


def check_run_directory(job: Job, run_dir: Path | None) -> list[ConfigError]:
    """``run_dir``: exactly this one; None: a new folder in the job's ``runs``."""
    problem = _unwritable(run_dir or Path(job.job.runs))
    if not problem:
        return []
    origin = "--run-dir" if run_dir else job.origin(("job", "runs"))
    fix = "choose another place with --run-dir, or with runs in [job]"
    return [ConfigError(f"no run directory can be made: {problem}", origin=origin, fix=fix)]


def _unwritable(path: Path) -> str:
    """Why nothing can be made at ``path``; "" when it can. What must take it is the first folder that exists: its
    permissions alone do not tell, for some file systems take nothing from anybody."""
    path = path.absolute()
    found = next(place for place in (path, *path.parents) if os.path.lexists(place))
    if not found.is_dir():
        return f"{found} is not a folder"
    try:
        os.rmdir(tempfile.mkdtemp(prefix=".headrace-", dir=found))
    except OSError as error:
        return f"{found} takes no new folder: {error.strerror}"
    return ""
