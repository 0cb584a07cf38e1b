"""What a phase must not leave to the next."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.run.loop import TrainingLoop
from headrace.run.parts import PhaseRun
from support.desk import COLUMNS, turns


async def nothing(*_: Any, **__: Any) -> Any:
    return None


async def test_a_phase_ends_when_its_evaluations_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next phase's flow knows nothing of their pins, and would have instances retire what they ask for."""
    ignored = SimpleNamespace(
        begin_phase=lambda *_: None,
        end_phase=lambda reason: [],
        follow=lambda flow: None,
        open_rows=lambda *_: None,
        tell=nothing,
        failed=asyncio.get_running_loop().create_future(),
    )
    job = SimpleNamespace(evaluation=SimpleNamespace(every=0))
    parts: Any = SimpleNamespace(
        job=job,
        controller=ignored,
        measures=ignored,
        fleet=ignored,
        workers=ignored,
        stages=SimpleNamespace(begin=nothing, end=nothing),
        stage_plan=lambda began: SimpleNamespace(columns=COLUMNS, apart={}),
        plan=lambda phase: SimpleNamespace(rollout=True),
    )
    loop = TrainingLoop(parts)
    evaluated = asyncio.Event()

    async def batch(*_: Any) -> None:
        loop._spawn(evaluated.wait(), "evaluate version 1")

    flow: Any = SimpleNamespace(next_group=3, group_size=2)
    monkeypatch.setattr(loop, "_begin_on_trainer", nothing)
    monkeypatch.setattr(loop, "_flow", lambda *_: flow)
    monkeypatch.setattr(loop, "_batch", batch)
    phase: Any = SimpleNamespace(name="rl", steps=1, until=None, batch=SimpleNamespace(group_size=2))
    running = asyncio.ensure_future(loop._run_phase(PhaseRun(0, phase, "", None), publishes=False))
    await turns()
    assert not running.done()
    evaluated.set()
    assert await running
