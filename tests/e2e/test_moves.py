"""Trajectories that move between the rollout instances of a running job, whose answers have a long tail."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from headrace.observe.audit import audit_run
from support.whole_runs import follow, pid_of

Start = Callable[..., Any]
MOVES = (
    "rollout.instances=3",
    "rollout.live_versions=1",
    "rollout.slots=8",
    "rollout.max_new_tokens=400",
    "model.scratch.max_length=512",
    "evaluation.every=0",
    "phase.rl.steps=1000",
)
"""An instance serves one version, and a third of the answers have more than ten times as many tokens as the shortest
third: the long ones of a version are gathered where that lets others take up the next."""


def test_the_long_tail_moves_with_its_keys_and_values_and_the_audit_passes(start: Start) -> None:
    run = start(*MOVES)
    follow(run, "trajectory_moved")
    run.interrupt()
    assert run.wait() == 130, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert result.summary["prefilled_again"] == 0


def test_a_run_whose_instance_is_killed_while_trajectories_move_goes_on(start: Start) -> None:
    run = start(*MOVES)
    moved = follow(run, "trajectory_moved")
    os.kill(pid_of(run, moved["target"]), signal.SIGKILL)
    follow(run, "batch_trained", after='"kind":"node_stopped"')
    run.interrupt()
    assert run.wait() == 130, run.stderr
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert result.summary["lost_nodes"] == {moved["target"]: 1}
