"""A run's directory: one place for every path in it.

RUN/
  job.json            the resolved job, every default written out
  events.jsonl        append-only; the audit's input
  metrics.jsonl       one object per training batch
  evaluation.jsonl    one object per evaluation, with sample answers
  model/              the model it started from, and `final/`, the exported result
  checkpoints/        what the run can be resumed from
  not_finite/         rows of steps whose loss or gradient was not finite, if there were any
  logs/               one file per node
  report.html
  controller.json     how commands find the controller, while the run is running
  lock                held by the process that works here
"""

from __future__ import annotations

import fcntl
import itertools
import json
from pathlib import Path
from typing import IO, Any

from headrace.errors import ConfigError, RunError


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
        self.job = path / "job.json"
        self.controller = path / "controller.json"
        self._lock: IO[bytes] | None = None

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
        """Exactly ``path``, which must not exist or be empty; an empty one may be a mounted volume."""
        try:
            return cls._make(path, or_empty=True)
        except FileExistsError:
            raise ConfigError(
                f"run directory {path} is not empty",
                origin="--run-dir",
                fix="name a new directory; a run never overwrites another",
            ) from None

    @classmethod
    def open(cls, path: Path) -> RunDirectory:
        """The directory of a run that is to go on. RunError when it is none, or its run is still going on."""
        run = cls(path.resolve())
        if not run.job.is_file():
            raise RunError(
                f"{path} is not the directory of a run: it has no {run.job.name}",
                origin="--resume",
                fix="name the directory that `headrace run` printed",
            )
        run._claim()
        return run

    def _claim(self) -> None:
        """One process works in a run directory at a time; the claim ends with the process."""
        self._lock = open(self.path / "lock", "wb")  # noqa: SIM115  # held as long as the process lives
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise RunError(
                f"the run in {self.path} is still going on",
                origin="--resume",
                fix="wait for its end, or stop it with Ctrl-C",
            ) from None

    @classmethod
    def _make(cls, path: Path, *, or_empty: bool = False) -> RunDirectory:
        try:
            path.mkdir(parents=True, exist_ok=or_empty)
            if any(path.iterdir()):
                raise FileExistsError
            run = cls(path.resolve())
            for folder in (run.models, run.checkpoints, run.logs):
                folder.mkdir()
            run._claim()
        except FileExistsError:
            raise
        except OSError as error:
            raise ConfigError(
                f"run directory {path} cannot be written: {error.strerror}",
                origin="--run-dir, or [job] runs",
                fix="choose another place with [job] runs or --run-dir",
            ) from error
        return run

    def has_initial_model(self) -> bool:
        """Whether the model that the run started from was made here, and is whole."""
        return (self.models / "initial" / "config.json").is_file()

    def checkpoint(self, version: int, *, event: int) -> Path:
        """Where the checkpoint of a version goes that was taken before an event; names sort by both."""
        return self.checkpoints / f"version-{version:08d}-event-{event:08d}"

    def write_job(self, resolved: dict[str, Any]) -> None:
        """Keep the resolved job."""
        self.job.write_text(json.dumps(resolved, indent=2) + "\n")
