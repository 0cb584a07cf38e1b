"""What becomes of a run when the machine under it misbehaves: a full disk, a cut log, a clock that is set."""

from __future__ import annotations

import itertools
import re
import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace import clock
from headrace.observe.audit import audit_run
from headrace.observe.event_log import EventLog
from headrace.observe.events import NodeStarted, RunFinished, read_events
from headrace.observe.report import write_report
from headrace.observe.report_data import collect
from support.mishaps import Mishaps
from support.whole_runs import alive

JOB = """
[job]
name = "mishaps"

[model.scratch]
vocabulary = 128

[environment]
use = "headrace.testing:FakeEnvironment"
vocabulary = 128

[rollout]
use = "headrace.testing:FakeInferenceEngine"
max_new_tokens = 8

[trainer]
use = "headrace.testing:FakeTrainingEngine"
learning_rate = 1.0

[algorithm]
use = "headrace.testing:FakeAlgorithm"

[batch]
groups = 2
group_size = 4

[staleness]
policy = "synchronous"

[[phase]]
name = "only"
steps = 40
"""
MODEL_BYTES = 128 * 128 * 4


# ---------------------------------------------------------------- a full disk


def run_on_a_disk_that_takes(nbytes: int, folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    """Per file, which every process of the run then meets."""
    (folder / "job.toml").write_text(JOB)
    sets = [word for override in overrides for word in ("--set", override)]
    return subprocess.run(
        [sys.executable, "-m", "headrace", "run", str(folder / "job.toml"), "--run-dir", str(folder / "run"), *sets],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, nbytes)),
        capture_output=True,
        text=True,
        check=False,
    )


def pids(directory: Path) -> list[int]:
    return [event.pid for event in read_events(directory) if isinstance(event, NodeStarted)]


def test_a_disk_too_full_for_the_event_log_ends_the_run_with_the_cause_and_a_log_that_reads(tmp_path: Path) -> None:
    done = run_on_a_disk_that_takes(MODEL_BYTES + 2000, tmp_path)
    assert done.returncode == 1
    assert re.search(r"cannot write .*events\.jsonl", done.stderr)
    assert "free disk space" in done.stderr
    assert "Traceback" not in done.stderr
    audit = audit_run(tmp_path / "run")
    assert audit.ok, "what is there is in order"
    assert len(pids(tmp_path / "run")) == 4
    assert alive(pids(tmp_path / "run")) == []


def test_a_disk_too_full_for_a_checkpoint_ends_the_run_with_the_cause_and_leaves_no_half_of_it(tmp_path: Path) -> None:
    """The trainer's save holds optimiser state too, and is larger than the model."""
    done = run_on_a_disk_that_takes(MODEL_BYTES + 2000, tmp_path, "phase.only.steps=1")
    assert done.returncode == 1
    assert re.search(r"checkpoints.*trainer cannot be written: File too large", done.stderr)
    assert "free disk space, keep fewer with [checkpoint] keep" in done.stderr
    assert "Traceback" not in done.stderr
    assert list((tmp_path / "run" / "checkpoints").iterdir()) == []
    (*_, last) = read_events(tmp_path / "run")
    assert isinstance(last, RunFinished)
    assert last.status == "failed"
    assert audit_run(tmp_path / "run").ok
    assert alive(pids(tmp_path / "run")) == []


# ---------------------------------------------------------------- a clock that is set


def test_times_that_are_written_do_not_go_back_with_the_clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with EventLog(tmp_path / "events.jsonl") as log:
        before, began = log.emit("version_retired", version=0), clock.now()
        real = time.time
        monkeypatch.setattr(time, "time", lambda: real() - 3600)
        after = log.emit("version_retired", version=1)
    assert 0 <= after["time"] - before["time"] < 60
    assert clock.now() >= began


def test_nothing_but_the_clock_asks_for_the_time_of_day() -> None:
    """Every deadline is of a time that is never set."""
    core = Path(headrace.__file__).parent
    root = core.parents[1]
    found = {
        path.name
        for folder in (core, root / "adapters", root / "plugins")
        for path in folder.rglob("*.py")
        if re.search(r"time\.time\(|datetime\.(now|today|utcnow)\(", path.read_text())
    }
    assert found == {"clock.py"}


@pytest.mark.parametrize("since", ["the resume", "the middle"])
def test_a_run_whose_clock_is_set_back_by_an_hour_passes_its_audit_and_has_a_report(tmp_path: Path, since: str) -> None:
    """By whoever resumes it, or on the way: nodes, too, may differ about the time of day."""
    run = Mishaps()
    middle = len(run.events) // 2
    set_back = [
        _earlier(event) if (event["epoch"] if since == "the resume" else event["seq"] >= middle) else event
        for event in run.events
    ]
    assert any(later["time"] < earlier["time"] for earlier, later in itertools.pairwise(set_back))
    run.events = set_back
    directory = run.write(tmp_path / "run")
    audit = audit_run(directory)
    assert audit.ok, audit.verdict
    assert audit.summary["seconds"] >= 0
    data = collect(directory)
    assert data.seconds >= 0
    assert all(seconds >= 0 for _, seconds in data.published)
    assert all(waited >= 0 and busy >= 0 for _, waited, busy in data.waits)
    assert write_report(directory).stat().st_size > 0


def _earlier(event: dict[str, Any]) -> dict[str, Any]:
    return {k: v - 3600 if k in ("time", "started", "finished") else v for k, v in event.items()}
