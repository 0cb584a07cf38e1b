"""A run's journal ends well, whatever the disk says."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import RunError
from headrace.run.journal import Journal


class Full:
    """A file on a disk that is full."""

    name = "events.jsonl"

    def __init__(self) -> None:
        self.closed = False

    def write(self, data: bytes) -> int:
        if self.closed:
            raise ValueError("write to closed file")
        raise OSError(28, "No space left on device")

    def close(self) -> None:
        self.closed = True


def test_a_run_that_a_full_disk_ended_ends_with_its_own_error(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    job: Any = SimpleNamespace(observers=[], resolved=dict)
    files = {name: tmp_path / f"{name}.jsonl" for name in ("events", "metrics", "evaluation")}
    directory: Any = SimpleNamespace(path=tmp_path, **files)
    journal = Journal(directory, job)
    journal._events._writer._file.close()
    journal._events._writer._file = Full()  # type: ignore[assignment]
    with pytest.raises(RunError, match="No space left on device"):
        journal.emit("version_retired", version=1)
    with caplog.at_level(logging.ERROR):
        journal.finish("failed", "the disk is full")
    assert "the end of the run is not in its event log" in caplog.text
    journal.close("failed", {})
