"""A job of fakes alone: the whole run, with all its processes, and nothing but numpy in them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.observe.audit import audit_run

JOB = """
observers = ["headrace.testing:FakeObserver"]

[job]
name = "fakes"

[model.scratch]
vocabulary = 8

[environment]
use = "headrace.testing:FakeEnvironment"
vocabulary = 8

[rollout]
use = "headrace.testing:FakeInferenceEngine"
instances = 2
max_new_tokens = 8

[trainer]
use = "headrace.testing:FakeTrainingEngine"
learning_rate = 20.0

[algorithm]
use = "headrace.testing:FakeAlgorithm"

[batch]
groups = 8
group_size = 4

[staleness]
policy = "headrace.testing:FakeStaleness"
max_staleness = 1

[storage]
use = "headrace.testing:FakeStorage"

[weights]
use = "headrace.testing:FakeWeightTransport"

[launcher]
use = "headrace.testing:FakeLauncher"

[[phase]]
name = "only"
steps = 20
"""


def run(folder: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    (folder / "job.toml").write_text(JOB)
    sets = [word for override in overrides for word in ("--set", override)]
    command = ["run", str(folder / "job.toml"), "--run-dir", str(folder / "run"), *sets]
    return subprocess.run([sys.executable, "-m", "headrace", *command], capture_output=True, text=True, check=False)


def test_a_job_of_fakes_runs_learns_and_passes_its_audit(tmp_path: Path) -> None:
    done = run(tmp_path)
    assert done.returncode == 0, done.stderr
    assert audit_run(tmp_path / "run").ok
    rewards = [
        json.loads(line)["reward/mean"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    ]
    assert sum(rewards[-5:]) > 1.3 * sum(rewards[:5])


@pytest.mark.parametrize(
    ("table", "said"),
    [
        ("rollout", "a decode step failed"),
        ("trainer", "an optimiser step failed"),
    ],
)
def test_a_fake_that_fails_when_it_is_told_to_fails_the_run_in_those_words(
    tmp_path: Path, table: str, said: str
) -> None:
    done = run(tmp_path, f"{table}.fail_after=2")
    assert done.returncode == 1
    logs = "".join(path.read_text() for path in (tmp_path / "run" / "logs").glob("*.log"))
    assert said in done.stderr + logs


ALTERED = '''"""A storage that pays a little more than was reported."""

from headrace.testing import FakeStorage


class Altered(FakeStorage):
    def put(self, batch):
        return super().put(batch.with_columns({"only/reward": batch.dense("only/reward") + 0.125}))
'''


def test_rewards_that_the_trainer_reads_otherwise_than_they_were_reported_fail_the_audit(tmp_path: Path) -> None:
    (tmp_path / "altered.py").write_text(ALTERED)
    done = run(tmp_path, "storage.use='./altered.py:Altered'", "phase.only.steps=2")
    assert done.returncode == 1
    assert audit_run(tmp_path / "run").violated == {"rewards": 2 * 8 * 4}


REFUSING = '''"""A storage that keeps nothing."""

from headrace.testing import FakeStorage


class Refusing(FakeStorage):
    def put(self, batch):
        raise ValueError("this storage keeps nothing")
'''


def test_a_storage_that_refuses_every_row_stops_the_run_in_its_own_words(tmp_path: Path) -> None:
    (tmp_path / "refusing.py").write_text(REFUSING)
    done = run(tmp_path, "storage.use='./refusing.py:Refusing'")
    assert done.returncode == 1
    assert "this storage keeps nothing" in done.stderr
    assert audit_run(tmp_path / "run").ok


WEIGHED = '''"""A storage that writes down how many bytes it keeps."""

from pathlib import Path

from headrace.testing import FakeStorage


class Weighed(FakeStorage):
    def put(self, batch):
        kept = super().put(batch)
        with Path(__file__).with_name("weights").open("a") as file:
            print(self.stats().nbytes, file=file)
        return kept
'''
CAPACITY = 4500


def test_the_unit_of_a_run_keeps_no_more_than_its_capacity_and_producers_wait_instead(tmp_path: Path) -> None:
    (tmp_path / "weighed.py").write_text(WEIGHED)
    weighed = ("storage.use='./weighed.py:Weighed'", "phase.only.steps=6")
    done = run(tmp_path, *weighed, f"storage.capacity={CAPACITY}")
    assert done.returncode == 0, done.stderr
    assert audit_run(tmp_path / "run").ok
    assert max(map(int, (tmp_path / "weights").read_text().split())) <= CAPACITY
