"""What the README shows runs: each of its `[environment]` tables, in the demo's job, cut down to a few batches."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.config import dumps

ROOT = Path(__file__).parents[2]
TABLES = re.findall(r"```toml\n(\[environment\].*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
REWARD = re.findall(r"```python\n(def reward.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)

SMALL = [
    "phase.warm-up.steps=2",
    "phase.reinforce.steps=2",
    "phase.warm-up.batch.groups=8",
    "phase.reinforce.batch.groups=4",
    "phase.reinforce.batch.group_size=2",
    "evaluation.prompts=4",
]


def test_the_readme_shows_a_reward_data_and_another_task() -> None:
    assert [tomllib.loads(t)["environment"]["use"] for t in TABLES] == ["sort_symbols", "jsonl", "reasoning_gym"]


def test_the_reward_in_the_readme_is_the_one_in_the_examples() -> None:
    assert REWARD[0].strip() in (ROOT / "examples" / "rewards" / "ten_lines.py").read_text()


@pytest.mark.parametrize("table", TABLES, ids=[tomllib.loads(t)["environment"]["use"] for t in TABLES])
def test_an_environment_of_the_readme_runs_in_the_demos_job(table: str, tmp_path: Path) -> None:
    examples = tmp_path / "examples"
    shutil.copytree(ROOT / "examples", examples)
    job = tomllib.loads((examples / "sort_symbols" / "job.toml").read_text())
    job["environment"] = tomllib.loads(table)["environment"]
    path = examples / "sort_symbols" / "mine.toml"
    path.write_text(dumps(job))
    command = [sys.executable, "-m", "headrace", "run", str(path), "--run-dir", str(tmp_path / "run")]
    sets = [word for override in SMALL for word in ("--set", override)]
    done = subprocess.run([*command, *sets], capture_output=True, text=True, timeout=180, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
