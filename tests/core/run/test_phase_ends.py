"""What a phase must not leave to the next."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.registry import PluginSpec
from headrace.run.loop import TrainingLoop
from headrace.run.parts import PhaseRun
from support.desk import COLUMNS, turns


async def nothing(*_: Any, **__: Any) -> Any:
    return None


def phase_parts(flow: Any, *, end_stages: Callable[..., Any] = nothing) -> Any:
    """What the loop works on, where nothing happens."""
    ignored = SimpleNamespace(
        begin_phase=lambda *_: None,
        end_phase=lambda reason: [],
        follow=lambda flow: None,
        open_rows=lambda *_: None,
        tell=nothing,
        failed=asyncio.get_running_loop().create_future(),
    )
    return SimpleNamespace(
        job=SimpleNamespace(evaluation=SimpleNamespace(every=0)),
        controller=ignored,
        measures=ignored,
        fleet=ignored,
        workers=ignored,
        stages=SimpleNamespace(begin=nothing, end=end_stages),
        stage_plan=lambda began: SimpleNamespace(columns=COLUMNS, apart={}),
        plan=lambda phase: SimpleNamespace(rollout=True),
    )


def one_batch(loop: TrainingLoop, flow: Any, batch: Callable[..., Any], patch: pytest.MonkeyPatch) -> Awaitable[bool]:
    """A phase of one batch."""
    patch.setattr(loop, "_begin_on_trainer", nothing)
    patch.setattr(loop, "_flow", lambda *_: flow)
    patch.setattr(loop, "_batch", batch)
    algorithm = PluginSpec(role="algorithm", use="grpo", settings={})
    phase: Any = SimpleNamespace(
        name="rl", steps=1, until=None, batch=SimpleNamespace(group_size=2), algorithm=algorithm
    )
    return loop._run_phase(PhaseRun(0, phase, "", None), publishes=False)


async def test_a_phase_ends_when_its_evaluations_have_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next phase's flow knows nothing of their pins, and would have instances retire what they ask for."""
    flow = SimpleNamespace(end=3, group_size=2)
    loop = TrainingLoop(phase_parts(flow))
    evaluated = asyncio.Event()

    async def batch(*_: Any) -> None:
        loop._spawn(evaluated.wait(), "evaluate version 1")

    running = asyncio.ensure_future(one_batch(loop, flow, batch, monkeypatch))
    await turns()
    assert not running.done()
    evaluated.set()
    assert await running


async def test_a_group_that_starts_while_a_phase_ends_shares_no_id_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    flow = SimpleNamespace(end=3, group_size=2)

    async def end_stages() -> None:
        flow.end = 5

    loop = TrainingLoop(phase_parts(flow, end_stages=end_stages))
    assert await one_batch(loop, flow, nothing, monkeypatch)
    assert (loop._next_group, loop._next_trajectory) == (5, 10)
