"""A run is scaled while it is running, by the command that a person gives."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.observe.audit import audit_run
from support.whole_runs import PHASE_TWO, alive, events, follow, pid_of

Start = Callable[..., Any]


def scale(run_dir: Path, instances: int) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "headrace", "scale", str(run_dir), "--rollout", str(instances)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def test_a_run_is_scaled_from_one_instance_to_three_and_back_and_nothing_is_lost(start: Start) -> None:
    run = start("phase.rl.steps=100000", "rollout.instances=1", "network.transport=tcp")
    follow(run, "batch_trained", after=PHASE_TWO)
    grown = scale(run.directory, 3)
    assert (grown.returncode, grown.stdout) == (0, "3 rollout instances: rollout-0, rollout-1, rollout-2\n"), grown
    assert scale(run.directory, 3).stdout == grown.stdout, "asking again changes nothing"
    follow(run, "version_published", after='"kind":"instance_version","instance":"rollout-1"')
    follow(run, "batch_trained", after='"kind":"instance_version","instance":"rollout-2"')
    shrunk = scale(run.directory, 1)
    assert (shrunk.returncode, shrunk.stdout) == (0, "1 rollout instance: rollout-0\n"), shrunk
    assert alive([pid_of(run, "rollout-1"), pid_of(run, "rollout-2")]) == []
    follow(run, "batch_trained", after='"kind":"instance_left","instance":"rollout-1"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert result.summary["failed_attempts"] == result.summary["lost_nodes"] == {}
    assert {e["instance"] for e in events(run, "trajectory_finished")} >= {"rollout-0", "rollout-1", "rollout-2"}
    assert len([e for e in events(run, "node_started") if e["role"] == "rollout"]) == 3
    assert scale(run.directory, 2).returncode == 1, "it is over"


def test_a_synchronous_run_is_scaled_too_and_no_instance_waits_for_a_share_that_does_not_come(start: Start) -> None:
    run = start("phase.rl.steps=100000", "rollout.instances=1", "staleness.max_staleness=0")
    follow(run, "batch_trained", after=PHASE_TWO)
    assert scale(run.directory, 2).returncode == 0
    follow(run, "trajectory_finished", after='"kind":"instance_version","instance":"rollout-1"')
    assert scale(run.directory, 1).returncode == 0
    follow(run, "batch_trained", after='"kind":"instance_left"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert result.summary["failed_attempts"] == {}


def test_a_job_that_asks_for_it_is_scaled_by_itself(start: Start) -> None:
    run = start("phase.rl.steps=100000", "rollout.instances=1", "rollout.autoscale={ min = 2, max = 2 }")
    follow(run, "trajectory_finished", after='"kind":"instance_version","instance":"rollout-1"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    assert "scaling from 1 to 2 rollout instances" in run.stdout + run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
