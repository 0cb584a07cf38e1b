"""What benchmarks on the demo job share: the job as a dict, one warmed-up checkpoint per seed, runs, their records.

A benchmark compares stretches of GRPO, so that every run begins with weights that the demo's warm-up phase left once
per seed, and neither evaluates nor writes checkpoints unless it is told to. Runs are kept in ``work``.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from headrace.config.toml import dumps

JOB_FILE = Path(__file__).parents[2] / "examples" / "sort_symbols" / "job.toml"
CORES = 2
"""What every side of a comparison gets."""

JobTable = dict[str, Any]


def use_two_cores() -> None:
    """Bind this process, and what it starts from now on, to two cores. SystemExit where there are fewer."""
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < CORES:
        raise SystemExit(f"this process may use {len(cores)} core(s); the comparison is of work on {CORES}")
    os.sched_setaffinity(0, cores[:CORES])


def demo_job(seed: int) -> JobTable:
    """The demo's job file as it is, but for the seed."""
    job = tomllib.loads(JOB_FILE.read_text())
    job["job"]["seed"] = seed
    return job


def reinforce_job(model: Path, *, seed: int, batches: int, staleness: Mapping[str, Any]) -> JobTable:
    """Only the demo's second phase, from the weights in ``model``, under ``staleness``."""
    job = demo_job(seed)
    job["model"] = {"path": str(model)}
    job["staleness"] = dict(staleness)
    job["evaluation"] = {"every": 0}
    job["checkpoint"] = {"every": 0}
    job["phase"] = [copy.deepcopy(job["phase"][1])]
    job["phase"][0]["steps"] = batches
    return job


def warmed_up(work: Path, seed: int) -> Path:
    """The exported model that the demo's warm-up leaves, trained at the first call and kept."""
    run = work / f"warm-up-{seed}"
    model = run / "model" / "final"
    if not (run / "done").exists():
        job = demo_job(seed)
        job["phase"] = job["phase"][:1]
        run_job(job, run)
        (run / "done").touch()
    return model


def run_job(
    job: JobTable, run: Path, *, watch: Callable[[int], contextlib.AbstractContextManager[Any]] | None = None
) -> None:
    """``headrace run`` into ``run``, in place of what was there; ``watch`` is entered with the process's id while it
    runs. SystemExit with the end of the output when the run fails."""
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    file, log = run.parent / f"{run.name}.toml", run.parent / f"{run.name}.log"
    file.write_text(dumps(job))
    command = [sys.executable, "-m", "headrace", "run", str(file), "--run-dir", str(run)]
    with (
        log.open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process,
        contextlib.nullcontext() if watch is None else watch(process.pid),
    ):
        status = process.wait()
    if status:
        raise SystemExit(f"{' '.join(command)} failed ({status}); {log} ends:\n{log.read_text()[-2000:]}")


def records(file: Path) -> list[dict[str, Any]]:
    """A file of one JSON object a line."""
    return [json.loads(line) for line in file.read_text().splitlines()]


def progress(text: str) -> None:
    """To stderr: stdout is the result."""
    print(text, file=sys.stderr, flush=True)
