"""``headrace plan``: the split is where rollout and training balance, and K is no larger than it needs to be."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.cli import main

JOB = str(Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml")


def plan(*arguments: str) -> int:
    """A batch of 256 answers of 32 tokens is 64 s of an instance of 64 slots, of which a step takes half a second. On
    one device training takes as long, unless an argument says otherwise."""
    costs = ["--set", "simulation.step_seconds=0.5", "--set", "simulation.train_seconds=64"]
    return main(["plan", JOB, *costs, "--lengths", "constant:tokens=32", "--batches", "12", *arguments])


def planned(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, object]:
    assert plan(*arguments, "--json") == 0
    found: dict[str, object] = json.loads(capsys.readouterr().out)["proposed"]
    return found


def test_equal_work_is_divided_equally(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--devices", "8")
    assert (found["rollout"], found["trainer"]) == (4, 4)


def test_a_trainer_with_less_to_do_gets_fewer_devices(capsys: pytest.CaptureFixture[str]) -> None:
    found = planned(capsys, "--devices", "8", "--set", "simulation.train_seconds=21")
    assert (found["rollout"], found["trainer"]) == (6, 2)


def test_costs_that_were_measured_on_several_devices_are_spread(capsys: pytest.CaptureFixture[str]) -> None:
    one = planned(capsys, "--devices", "8")
    two = planned(capsys, "--devices", "8", "--set", "simulation.train_seconds=32", "--trainer-devices", "2")
    assert (one["rollout"], one["trainer"]) == (two["rollout"], two["trainer"])


def test_staleness_that_gains_nothing_is_not_proposed(capsys: pytest.CaptureFixture[str]) -> None:
    """Equal lengths need no more than one step of overlap, whatever the job allows."""
    assert plan("--devices", "8", "--set", "staleness.max_staleness=3") == 0
    told = capsys.readouterr().out
    assert [line[:5] for line in told.splitlines()] == ["K = 0", "K = 1", "K = 2", "K = 3", "propo"]
    assert told.splitlines()[-1].endswith("4 for the trainer, staleness.max_staleness = 1")


def test_one_device_cannot_be_divided(capsys: pytest.CaptureFixture[str]) -> None:
    assert plan("--devices", "1") == 2
    assert "1 device cannot be divided" in capsys.readouterr().err
