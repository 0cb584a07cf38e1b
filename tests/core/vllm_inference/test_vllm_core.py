"""What vLLM owes is not waited for once it has died."""

from __future__ import annotations

import asyncio

import pytest

from headrace_vllm import core
from headrace_vllm.core import Core


class Dead:
    """As an ``AsyncLLM`` is whose processes were killed while they were asked."""

    async def pause_generation(self, **_: object) -> None:
        await asyncio.Event().wait()

    async def get_weight_version(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def check_health(self) -> None:
        raise RuntimeError("EngineCore encountered an issue")


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setattr(core, "LOOK_SECONDS", 0.0)
    dead = object.__new__(Core)  # whose making imports vLLM
    dead._engine = Dead()
    return dead


async def test_a_load_ends_with_the_vllm_that_was_to_do_it(dead: Core) -> None:
    with pytest.raises(RuntimeError, match="EngineCore encountered an issue"):
        await dead.load({}, 1)


async def test_a_dead_vllm_is_not_waited_for_to_tell_its_version(dead: Core) -> None:
    with pytest.raises(RuntimeError, match="EngineCore encountered an issue"):
        await dead.version()
