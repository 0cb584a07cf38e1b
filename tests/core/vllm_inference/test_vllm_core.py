"""What vLLM owes is not waited for once it has died."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest

from headrace_vllm import core
from headrace_vllm.core import Core, Vllm


class Dead:
    """As a vLLM is whose processes were killed while they were asked."""

    tells_versions = True

    async def pause(self) -> None:
        await asyncio.Event().wait()

    async def weight_version(self) -> str:
        await asyncio.Event().wait()
        return ""

    async def check(self) -> None:
        raise RuntimeError("EngineCore encountered an issue")


@pytest.fixture
def dead(monkeypatch: pytest.MonkeyPatch) -> Core:
    monkeypatch.setattr(core, "LOOK_SECONDS", 0.0)
    return Core(cast(Vllm, Dead()), context=8)


async def test_a_load_ends_with_the_vllm_that_was_to_do_it(dead: Core) -> None:
    with pytest.raises(RuntimeError, match="EngineCore encountered an issue"):
        await dead.load({}, 1)


async def test_a_dead_vllm_is_not_waited_for_to_tell_its_version(dead: Core) -> None:
    with pytest.raises(RuntimeError, match="EngineCore encountered an issue"):
        await dead.version()
