"""A run's directory: one place for every path in it.

RUN/
  job.json            the resolved job, every default written out
  events.jsonl        append-only; the audit's input
  metrics.jsonl       one object per training batch
  evaluation.jsonl    one object per evaluation, with sample answers
  model/              the model it started from, and `final/`, the exported result
  checkpoints/        resume saves
  logs/               one file per node
  report.html
"""

from __future__ import annotations

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


class RunDirectory:
    """Paths of one run. Making one raises ConfigError where it cannot be had."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.events = path / "events.jsonl"
        self.metrics = path / "metrics.jsonl"
        self.evaluation = path / "evaluation.jsonl"
        self.models = path / "model"
        self.checkpoints = path / "checkpoints"
        self.logs = path / "logs"

    @classmethod
    def create(cls, base: Path, name: str) -> RunDirectory:
        """The first unused ``base/name-N``."""
        for number in itertools.count(1):
            try:
                return cls._make(base / f"{name}-{number}")
            except FileExistsError:
                continue
        raise AssertionError("unreachable")

    @classmethod
    def create_at(cls, path: Path) -> RunDirectory:
        """Exactly ``path``, which must not exist or be empty."""
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()
        try:
            return cls._make(path)
        except FileExistsError:
            raise ConfigError(
                f"run directory {path} is not empty",
                origin="--run-dir",
                fix="name a new directory; a run never overwrites another",
            ) from None

    @classmethod
    def _make(cls, path: Path) -> RunDirectory:
        try:
            path.mkdir(parents=True)
            run = cls(path.resolve())
            for folder in (run.models, run.checkpoints, run.logs):
                folder.mkdir()
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(
                f"run directory {path} cannot be written: {error.strerror}",
                origin="--run-dir, or [job] runs",
                fix="choose another place with [job] runs or --run-dir",
            ) from error
        return run

    def checkpoint(self, version: int) -> Path:
        """Where the checkpoint of a version goes; names sort by version."""
        return self.checkpoints / f"version-{version:08d}"

    def prune_checkpoints(self, *, keep: int) -> None:
        """Remove all but the newest ``keep``. Called after a save, so that a complete one always exists."""
        for path in sorted(self.checkpoints.glob("version-*"))[:-keep]:
            shutil.rmtree(path)

    def write_job(self, resolved: dict[str, Any]) -> None:
        """Keep the resolved job."""
        (self.path / "job.json").write_text(json.dumps(resolved, indent=2) + "\n")
