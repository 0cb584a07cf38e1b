"""Rollout nodes with a server of their own in the test's process, whose decode steps wait for the test."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from headrace.contract import GenerationRequest, Sampling
from headrace.registry import PluginSpec
from headrace.services.messages import RolloutSetup
from headrace.services.node_messages import NodeSpec
from headrace.services.request_messages import GenerateCall, Generated
from headrace.services.rollout import BASE_VERSION, RolloutService
from headrace.testing import FakeInferenceEngine
from headrace.wire import Client, Network, Server

PROMPT = np.array([3, 1, 2], dtype=np.int32)
TOKENS = 200
DEADLINE = 60.0


class Instance:
    """A rollout node that can be called."""

    def __init__(
        self, name: str, folder: Path, network: Network, settings: dict[str, Any], *, publisher: str = ""
    ) -> None:
        setup = RolloutSetup(
            engine=PluginSpec(role="inference_engine", use="headrace.testing:FakeInferenceEngine", settings=settings),
            transport=PluginSpec(role="weight_transport", use="headrace.testing:FakeWeightTransport", settings={}),
            model_path=str(folder / "model"),
            publisher=publisher or str(folder),
            threads=1,
        )
        spec = NodeSpec(
            name=name, role="rollout", start=0, controller="", network=network, setup=msgspec.msgpack.encode(setup)
        )
        self.service = RolloutService(spec)
        self.server: Server = network.server(*self.service.served, name=name)
        self.address = ""
        self.client: Client
        self.decodes = asyncio.Event()
        self.decodes.set()
        self.engine._trouble.work_async = self._work  # type: ignore[method-assign]  # a step waits for the test

    async def _work(self, what: str) -> None:
        await asyncio.sleep(0)
        await self.decodes.wait()

    async def start(self, network: Network) -> None:
        await self.service.start()
        self.address = await self.server.start()
        self.client = network.client(self.address)

    async def close(self) -> None:
        await self.client.close()
        await self.server.close()
        await self.service.cancel_background()
        await self.service.close()

    async def ask(self, method: str, call: object, reply: Any = Generated) -> Any:
        return await self.client.call(method, call, reply=reply, deadline=DEADLINE)

    @property
    def engine(self) -> FakeInferenceEngine:
        assert isinstance(self.service._engine, FakeInferenceEngine)
        return self.service._engine

    async def prefilled(self) -> int:
        return (await self.service.health(None)).prefilled_tokens


def asking(name: str = "r", trajectory: int = 7, *, version: int = BASE_VERSION) -> GenerateCall:
    """A long answer."""
    request = GenerationRequest(
        request_id=name, prompt=PROMPT, sampling=Sampling(max_new_tokens=TOKENS, seed=5), version=version
    )
    return GenerateCall(request=request, trajectory=trajectory, movable=True)


async def begun(instance: Instance, call: GenerateCall, *, tokens: int = 3) -> asyncio.Task[Generated]:
    """The call, when its request has some tokens; it gets no more before ``decodes`` is set."""
    before = instance.engine._generated
    answer = asyncio.create_task(instance.ask("generate", call))
    await until(lambda: instance.engine._generated >= before + tokens)
    instance.decodes.clear()
    return answer


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE):
        while not happened():  # noqa: ASYNC110 - turns of the loop in which both instances live
            await asyncio.sleep(0)
