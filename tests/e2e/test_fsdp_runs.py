"""A run whose trainer is several processes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

from headrace.observe.audit import audit_run
from support.whole_runs import PHASE_TWO, alive, descendants, events, follow, pid_of

TWO_RANKS = ("trainer.use=fsdp", "trainer.ranks=2")


def test_a_job_completes_on_two_ranks_and_leaves_none(start: Callable[..., Any]) -> None:
    run = start(*TWO_RANKS)
    follow(run, "phase_started", of=PHASE_TWO)
    ranks = descendants(pid_of(run, "trainer"))
    assert len(ranks) == 1
    assert run.wait() == 0, run.stderr
    assert len(events(run, "batch_trained")) == 9
    result = audit_run(run.directory)
    assert result.ok, result.violations
    assert alive(ranks) == []


def test_a_run_whose_rank_is_killed_says_so_and_goes_on_when_it_is_resumed(
    start: Callable[..., Any], resume: Callable[[Any], Any]
) -> None:
    run = start(*TWO_RANKS, "phase.rl.steps=16", "checkpoint.every=2")
    follow(run, "checkpoint_saved", after=PHASE_TWO)
    (rank,) = descendants(pid_of(run, "trainer"))
    os.kill(rank, signal.SIGKILL)
    assert run.wait() != 0
    assert f"rank 1 (process {rank}) was killed by SIGKILL" in run.stderr
    again = resume(run)
    assert again.wait() == 0, again.stderr
    result = audit_run(again.directory)
    assert result.ok, result.violations
    assert events(again, "resumed")
