"""``headrace simulate`` as a user meets it."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from headrace.cli import main

JOB = str(Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml")
COSTS = ["--set", "simulation.step_seconds=0.01", "--set", "simulation.train_seconds=0.3"]
LENGTHS = ["--lengths", "lognormal:median=10,sigma=1,cap=36"]


def simulate(*arguments: str) -> int:
    return main(["simulate", JOB, *COSTS, "--batches", "8", *arguments])


def test_policies_are_compared_in_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*LENGTHS, "--policies", "synchronous,delayed_update,windowed:2,multi_version:3") == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("8 batches of 32 x 8 trajectories, the first 2 not measured; 2 instances of 64 slots")
    assert lines[1].split()[0] == "policy"
    names = ["synchronous K=0", "delayed_update K=1", "windowed K=2", "multi_version K=3"]
    assert [line[:19].strip() for line in lines[2:]] == names


def test_json_is_the_same_for_the_same_seed_and_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    told = []
    for _ in range(2):
        assert simulate(*LENGTHS, "--instances", "3", "--json") == 0
        told.append(json.loads(capsys.readouterr().out))
    assert told[0] == told[1]
    assert told[0]["instances"] == 3
    assert told[0]["costs"]["train_seconds"] == 0.3
    (own,) = told[0]["policies"]
    assert own["policy"] == "multi_version K=2"
    assert sum(own["staleness"].values()) == pytest.approx(1)


def test_a_page_shows_what_happened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    assert simulate(*LENGTHS, "--policies", "synchronous,multi_version:2", "--gantt", str(page)) == 0
    text = page.read_text()
    assert text.count("<svg") == 2
    assert all(name in text for name in ("synchronous K=0", "multi_version K=2", "trainer", "rollout-1"))
    assert [path.name for path in tmp_path.iterdir()] == ["page.html"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "how long responses are is not known"),
        ([*LENGTHS, "--policies", "windowed"], "max_staleness is missing"),
        ([*LENGTHS, "--policies", "multi_version:1,nothing:2"], "no staleness named 'nothing'"),
        ([*LENGTHS, "--policies", "delayed_update:2"], "max_staleness = 2 != 1"),
        ([*LENGTHS, "--phase", "warm-up"], "the job has no phase 'warm-up' that rolls out; those are: reinforce"),
        ([*LENGTHS, "--set", "simulation.kv_tokens=20"], "simulation.kv_tokens = 20 < 37"),
        ([*LENGTHS, "--set", "simulation.train_secnds=1"], "Did you mean 'train_seconds'"),
    ],
)
def test_a_wrong_argument_is_taught(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*arguments) == 2
    told = capsys.readouterr().err
    assert message in told
    assert "fix:" in told


def test_costs_that_nobody_gave_are_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", JOB, *LENGTHS]) == 2
    told = capsys.readouterr().err
    assert "simulation.step_seconds is missing" in told
    assert "--calibrate RUN" in told


def test_a_calibration_without_a_run_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate("--calibrate", str(tmp_path)) == 1
    assert "cannot read" in capsys.readouterr().err


def test_a_page_that_cannot_be_written_is_no_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(*LENGTHS, "--gantt", str(tmp_path / "nowhere" / "page.html")) == 1
    assert "the picture cannot be written" in capsys.readouterr().err


def test_simpy_is_named_when_it_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for name in [name for name in sys.modules if name.startswith("headrace.simulate")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "simpy", None)
    assert simulate(*LENGTHS) == 2
    assert 'pip install "headrace[simulation]"' in capsys.readouterr().err
