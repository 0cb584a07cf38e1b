"""What CONTRIBUTING shows an author works as it is shown: its suites pass, and its engine and storage do in a job."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.observe.audit import audit_run

ROOT = Path(__file__).parents[2]
NAMED = re.compile(r"^```python\n# (\w+\.py)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SHOWN = dict(NAMED.findall((ROOT / "CONTRIBUTING.md").read_text()))
SUITES = ("test_folder.py", "test_mean_baseline.py", "test_rows_in_sqlite.py")
ENGINE = ROOT / "examples" / "own_engine"
SHORT = (
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
    "evaluation.prompts=16",
    "phase.warm-up.steps=2",
    "phase.reinforce.steps=3",
    "phase.reinforce.batch.groups=4",
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """With every file that the guide shows."""
    for name, text in SHOWN.items():
        (tmp_path / name).write_text(text)
    return tmp_path


def passes(*tests: str, folder: Path) -> None:
    """As in a project of an author's, without this one's settings. Without a single test pytest fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:randomly", "-c", "/dev/null", "--rootdir", str(folder)]
    done = subprocess.run([*command, *tests], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_suite_that_the_guide_shows_is_tried() -> None:
    assert sorted(name for name in SHOWN if name.startswith("test_")) == list(SUITES)


@pytest.mark.parametrize("suite", SUITES)
def test_a_plugin_of_the_guide_keeps_the_rules_of_its_role(suite: str, folder: Path) -> None:
    passes(suite, folder=folder)


def test_the_engine_that_the_guide_walks_through_keeps_the_rules_of_its_role() -> None:
    passes("-p", "no:cacheprovider", "test_engine.py", folder=ENGINE)


def test_that_engine_and_the_storage_of_the_guide_do_their_part_in_a_job(folder: Path) -> None:
    storage = f"storage.use={folder}/rows_in_sqlite.py:SqliteStorage"
    overrides = [word for override in (*SHORT, storage) for word in ("--set", override)]
    command = [sys.executable, "-m", "headrace", "run", str(ENGINE / "job.toml"), "--run-dir", str(folder / "run")]
    done = subprocess.run([*command, *overrides], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert audit_run(folder / "run").ok
