"""The data plane alone, as its page shows it: four processes and no run."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

RUN = Path(__file__).parents[2] / "examples" / "data_plane" / "run.py"


def test_every_answer_of_the_example_is_generated_scored_and_trained_once() -> None:
    done = subprocess.run([sys.executable, RUN], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    said = done.stdout.splitlines()
    assert {"generated 64 groups of 4", "scored 256 answers", "trained 256 answers, each once"} <= set(said)
    assert sum(line.startswith("step ") for line in said) == 8
