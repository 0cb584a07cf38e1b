"""Small jobs run as a user runs them: one command, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

JOB = """
[job]
name = "small"
seed = 3

[model.scratch]
architecture = "llama"
alphabet = "0123456789abcdefghijklmnopqrstuvwxyz="
hidden_size = 32
layers = 1
heads = 2
intermediate_size = 64
max_length = 64

[environment]
use = "sort_symbols"
median = 3
shortest = 2
longest = 6

[rollout]
use = "torch"
instances = 2
slots = 16
max_new_tokens = 8

[trainer]
use = "torch"
learning_rate = 1e-3

[algorithm]
use = "grpo"

[batch]
groups = 8
group_size = 4
mini_batches = 2
micro_batch_tokens = 512

[staleness]
policy = "multi_version"
max_staleness = 2

[evaluation]
every = 4
prompts = 16

[[phase]]
name = "warm-up"
steps = 4
algorithm = { use = "supervised" }
batch = { groups = 16, group_size = 1, mini_batches = 1 }

[[phase]]
name = "rl"
steps = 5
"""


class Run:
    """A started `headrace run`."""

    def __init__(self, job: Path, run_dir: Path, *overrides: str) -> None:
        self.directory = run_dir
        sets = [word for override in overrides for word in ("--set", override)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "run", str(job), "--run-dir", str(run_dir), *sets],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout = ""
        self.stderr = ""

    def wait(self, *, seconds: float = 120) -> int:
        """The exit status."""
        self.stdout, self.stderr = self.process.communicate(timeout=seconds)
        return self.process.returncode

    def interrupt(self) -> None:
        """Ctrl-C."""
        os.kill(self.process.pid, signal.SIGINT)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """Start the small job with overrides; whatever is left of it is killed at the end of the test."""
    job = tmp_path / "job.toml"
    job.write_text(JOB)
    runs: list[Run] = []

    def begin(*overrides: str) -> Run:
        runs.append(Run(job, tmp_path / f"run-{len(runs)}", *overrides))
        return runs[-1]

    yield begin
    for run in runs:
        if run.process.poll() is None:
            run.process.kill()
            run.process.communicate()
