"""A run whose trainer is several processes."""

from __future__ import annotations

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
