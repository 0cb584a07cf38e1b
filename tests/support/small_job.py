"""A small job, run as a user runs it: one command, real processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

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
reward = "./reward.py:digits"

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


REWARD = '''"""A reward that a model without any training gets now and then, so that there is something to learn."""


def digits(prompt: str, answer: str) -> float:
    """The share of digits."""
    return sum(symbol.isdigit() for symbol in answer) / max(len(answer), 1)
'''


class Run:
    """A started `headrace run`."""

    def __init__(self, run_dir: Path, *arguments: str) -> None:
        self.directory = run_dir
        self.process = subprocess.Popen(
            [sys.executable, "-m", "headrace", "run", *arguments],
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


class SmallJob:
    """The job file in a folder, and the runs that were started from it."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._job = folder / "job.toml"
        self._job.write_text(JOB)
        (folder / "reward.py").write_text(REWARD)
        self._runs: list[Run] = []

    def start(self, *overrides: str) -> Run:
        """Start the job with overrides."""
        sets = [word for override in overrides for word in ("--set", override)]
        directory = self._folder / f"run-{len(self._runs)}"
        return self._started(Run(directory, str(self._job), "--run-dir", str(directory), *sets))

    def resume(self, run: Run) -> Run:
        """Continue a run in its place."""
        return self._started(Run(run.directory, "--resume", str(run.directory)))

    def _started(self, run: Run) -> Run:
        self._runs.append(run)
        return run

    def kill(self) -> None:
        """Whatever is left of the runs."""
        for run in self._runs:
            if run.process.poll() is None:
                run.process.kill()
                run.process.communicate()


@contextmanager
def small_job(folder: Path) -> Iterator[SmallJob]:
    """Nothing of it is left at the end."""
    job = SmallJob(folder)
    try:
        yield job
    finally:
        job.kill()
