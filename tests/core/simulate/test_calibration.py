"""Calibration: known costs, written as a run would tell of them, are found again."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.config import SimulationConfig, load_job
from headrace.errors import RunError
from headrace.simulate.calibration import calibrate

SLOTS, STEP, RISE, LATENCY = 4, 0.02, 0.004, 0.1
FIXED, PER_TOKEN, PUBLISH, TRANSFER, SCORING, PROMPT = 1.5, 0.001, 0.25, 0.5, 0.125, 7
JOB = Path(__file__).parents[3] / "examples" / "sort_symbols" / "job.toml"


class Told:
    """A run directory whose log tells of batches of 4 trajectories: they fill the slots of one instance, or but one
    of them, from the moment of publication."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        job = load_job(JOB, [f"rollout.slots={SLOTS}", "evaluation.every=0"])
        (directory / "job.json").write_text(json.dumps(job.resolved()))
        self.events: list[dict[str, Any]] = []
        self.metrics: list[dict[str, Any]] = []
        self.now = 100.0

    def tell(self, time: float, kind: str, **fields: Any) -> None:
        self.events.append({"seq": 0, "time": time, "epoch": 0, "kind": kind, **fields})

    def phase(self, *, rollout: bool = True) -> None:
        sizes = {"max_staleness": 0, "batch_groups": 4, "group_size": 1, "steps": 99}
        names = {"phase": "main", "algorithm": "grpo", "policy": "synchronous"}
        self.tell(self.now, "phase_started", rollout=rollout, version=0, **names, **sizes)
        self.tell(self.now, "version_published", version=0, digest="", nbytes=0)

    def batch(self, version: int, *, together: int, length: int) -> None:
        """``together`` trajectories at a time, of one length, so that as many run all the time."""
        done = self.now
        rows = range(4 * version, 4 * version + 4)
        for first in range(0, 4, together):
            running = min(together, 4 - first)
            begin, done = done, done + LATENCY + length * (STEP + RISE * (running - 1))
            for row in rows[first : first + running]:
                at = {"trajectory": row, "group": row, "instance": "rollout-0"}
                self.tell(begin, "trajectory_started", version=version, attempt=0, **at)
                tokens = {"prompt_tokens": PROMPT, "response_tokens": length, "finish_reason": "stop"}
                span = {"spans": [(version, 0, length)], "started": begin, "finished": done}
                self.tell(done, "trajectory_finished", **at, **tokens, **span)
                self.tell(done + SCORING, "row_stored", row=row, trajectory=row, group=row, version=version, nbytes=1)
        taken = done + SCORING
        trained = taken + FIXED + PER_TOKEN * 4 * (PROMPT + length)
        self.tell(taken, "batch_taken", version=version, groups=list(rows), rows=list(rows))
        times = {"started": taken, "finished": trained, "wait_seconds": taken - self.now}
        outcome = {"rewards": [1.0] * 4, "applied": True, "optimizer_steps": 1}
        self.tell(trained, "batch_trained", version=version, groups=list(rows), rows=list(rows), **outcome, **times)
        self.metrics.append({"version": version, "trainer/wait_seconds": taken - self.now})
        self.now = trained + PUBLISH
        self.tell(self.now, "version_published", version=version + 1, digest="", nbytes=0)
        self.tell(self.now + TRANSFER, "instance_version", instance="rollout-0", version=version + 1, digest="")

    def write(self) -> Path:
        self.events.sort(key=lambda event: event["time"])
        numbered = [{**event, "seq": seq} for seq, event in enumerate(self.events)]
        (self.directory / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in numbered))
        metrics = [{"time": 0.0, "phase": "main", "step": 0, **record} for record in self.metrics]
        (self.directory / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in metrics))
        return self.directory


@pytest.fixture
def run(tmp_path: Path) -> Path:
    told = Told(tmp_path)
    told.phase()
    for version in range(12):
        told.batch(version, together=1 + version % 4, length=20 + 7 * version)
    return told.write()


def test_costs_are_found_as_they_were(run: Path) -> None:
    costs = calibrate(run).costs
    assert costs == pytest.approx(
        {
            "prompt_tokens": PROMPT,
            "step_seconds": STEP,
            "step_seconds_per_request": RISE,
            "request_seconds": LATENCY,
            "scoring_seconds": SCORING,
            "train_seconds": FIXED,
            "train_seconds_per_token": PER_TOKEN,
            "publish_seconds": PUBLISH,
            "transfer_seconds": TRANSFER,
        },
        rel=0.05,
    )


def test_the_runs_own_step_and_lengths_are_kept(run: Path) -> None:
    found = calibrate(run)
    assert found.batches == 12
    drawn = found.lengths.at(np.random.default_rng(0).standard_normal(1000))
    assert set(drawn) <= {20.0 + 7 * version for version in range(12)}
    assert found.step_seconds > FIXED + PUBLISH


def test_what_the_job_writes_stands_against_what_was_measured(run: Path) -> None:
    costs = calibrate(run).over(SimulationConfig(train_seconds=9.0, kv_tokens=100))
    assert (costs.train_seconds, costs.kv_tokens) == (9.0, 100)
    assert costs.publish_seconds == pytest.approx(PUBLISH)


def test_a_run_that_is_too_short_is_refused(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.phase()
    told.batch(0, together=4, length=20)
    with pytest.raises(RunError, match="1 trained batches in a phase that rolls out; a calibration needs 4"):
        calibrate(told.write())


def test_a_run_of_demonstrations_is_refused(tmp_path: Path) -> None:
    told = Told(tmp_path)
    told.phase(rollout=False)
    with pytest.raises(RunError, match="no phase that rolled out"):
        calibrate(told.write())
