"""The example distribution is what an outsider would write: installed apart, found by name, used by a job."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.observe.audit import audit_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "outside_plugin"
JOB = EXAMPLE / "job.toml"
SHORT = (
    "model.scratch.hidden_size=32",
    "model.scratch.layers=1",
    "evaluation.prompts=16",
    "phase.warm-up.steps=2",
    "phase.reinforce.steps=3",
    "phase.reinforce.batch.groups=4",
)


@pytest.fixture(scope="module")
def outside(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The environment variables of an interpreter in which the example is installed."""
    target = tmp_path_factory.mktemp("installed")
    options = ("--quiet", "--no-deps", "--no-build-isolation", "--disable-pip-version-check", "--target", str(target))
    run(sys.executable, "-m", "pip", "install", *options, str(EXAMPLE), environment=dict(os.environ))
    return {**os.environ, "PYTHONPATH": os.pathsep.join([str(target), *filter(None, [os.environ.get("PYTHONPATH")])])}


def run(*command: str, environment: dict[str, str]) -> str:
    """What it prints; it must succeed."""
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def headrace(*words: str, environment: dict[str, str]) -> str:
    return run(sys.executable, "-m", "headrace", *words, environment=environment)


def test_its_algorithm_is_one_file_of_under_60_lines_and_one_entry_point() -> None:
    entry_points = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]["entry-points"]
    assert entry_points["headrace.algorithm"] == {"capped_rloo": "headrace_parity.rloo:Rloo"}
    assert len((EXAMPLE / "src" / "headrace_parity" / "rloo.py").read_text().splitlines()) < 60


def test_its_plugins_are_listed_with_their_distribution(outside: dict[str, str]) -> None:
    for role, name in (("environment", "running_parity"), ("algorithm", "capped_rloo")):
        listed = headrace("plugins", role, environment=outside)
        assert any(name in line and "headrace-parity" in line for line in listed.splitlines()), listed


def test_its_job_passes_the_checks(outside: dict[str, str]) -> None:
    headrace("check", str(JOB), environment=outside)


def test_a_short_run_with_it_completes_and_its_audit_passes(outside: dict[str, str], tmp_path: Path) -> None:
    overrides = [word for override in SHORT for word in ("--set", override)]
    headrace("run", str(JOB), "--run-dir", str(tmp_path / "run"), *overrides, environment=outside)
    assert audit_run(tmp_path / "run").ok


def test_it_passes_its_own_suites(outside: dict[str, str]) -> None:
    run(sys.executable, "-m", "pytest", "-q", "--rootdir", str(EXAMPLE), "-c", str(EXAMPLE / "pyproject.toml"),
        "-p", "no:cacheprovider", str(EXAMPLE / "tests"), environment=outside)  # fmt: skip
