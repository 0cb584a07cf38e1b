"""The rollout node between its callers and its engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from headrace.contract import (
    Array,
    EngineHealth,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceContext,
    InferenceEngine,
    MultiVersion,
    NoSettings,
    Sampling,
    VersionSpan,
    WeightManifest,
    WeightUpdate,
)
from headrace.contract.generation import empty_tokens
from headrace.registry import PluginSpec
from headrace.services import node, rollout
from headrace.services.interruptions import Interruptions
from headrace.services.messages import RolloutSetup, VersionCall
from headrace.services.node_messages import Heartbeat, NodeSpec
from headrace.services.request_messages import GenerateCall
from headrace.services.requests import Requests
from headrace.services.rollout import RolloutService
from headrace.wire import Network


@pytest.fixture
def sockets(tmp_path: Path) -> Path:
    """A private directory, as a run has."""
    tmp_path.chmod(0o700)
    return tmp_path


class SlowToEnd(InferenceEngine, MultiVersion):
    """Ends a request when the test says so, also one that was aborted."""

    Settings = NoSettings

    def __init__(self, settings: object = None) -> None:
        super().__init__(NoSettings())
        self.open: dict[str, int] = {}
        self.aborted: list[str] = []
        self.retired: list[int] = []
        self.parked = 0
        self._outputs: asyncio.Queue[list[GenerationOutput]] = asyncio.Queue()

    def end(self, request_id: str, reason: FinishReason = "aborted") -> None:
        version = self.open.pop(request_id)
        tokens: Array = empty_tokens() if reason == "aborted" else np.array([5], dtype=np.int32)
        spans = () if reason == "aborted" else (VersionSpan(version=version, start=0, stop=1),)
        self._outputs.put_nowait(
            [
                GenerationOutput(
                    request_id=request_id,
                    token_ids=tokens,
                    logprobs=np.zeros(len(tokens), dtype=np.float32),
                    spans=spans,
                    finish_reason=reason,
                )
            ]
        )

    async def start(self, context: InferenceContext) -> None: ...

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        self.open |= {request.request_id: request.version for request in requests}

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        while True:
            yield await self._outputs.get()

    async def abort(self, request_ids: Sequence[str]) -> None:
        self.aborted += request_ids

    async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
        raise NotImplementedError

    async def health(self) -> EngineHealth:
        return EngineHealth(versions=(7,), running=0, waiting=0, kv_used=0.5, generated_tokens=0, parked=self.parked)

    async def retire(self, version: int) -> None:
        assert version not in self.open.values(), "a version with an open request was retired"
        self.retired.append(version)

    async def close(self) -> None: ...


@pytest.fixture
async def service(sockets: Path) -> AsyncIterator[RolloutService]:
    setup = RolloutSetup(
        engine=PluginSpec(role="inference_engine", use="headrace.testing:FakeInferenceEngine"),
        transport=PluginSpec(role="weight_transport", use="headrace.testing:FakeWeightTransport"),
        model_path=str(sockets),
        publisher="nobody",
        threads=1,
    )
    spec = NodeSpec(
        name="rollout-0",
        role="rollout",
        start=0,
        controller="ipc://nowhere",
        network=Network.create(str(sockets)),
        setup=msgspec.msgpack.encode(setup),
    )
    service = RolloutService(spec)
    service._engine = SlowToEnd()
    service._requests = Requests(service._engine, migrates=False)
    service._interruptions = Interruptions(service._requests)
    service.supervise(service._requests.collect(), "engine outputs")
    yield service
    await service.cancel_background()


def call(request_id: str) -> GenerateCall:
    request = GenerationRequest(
        request_id=request_id, prompt=np.array([3], dtype=np.int32), sampling=Sampling(max_new_tokens=4), version=7
    )
    return GenerateCall(request=request)


async def turns(count: int = 5) -> None:
    """Let everything that can go on go on."""
    for _ in range(count):
        await asyncio.sleep(0)


async def test_a_version_is_retired_only_when_the_engine_has_ended_what_was_given_up(service: RolloutService) -> None:
    engine = service._engine
    assert isinstance(engine, SlowToEnd)
    answer = asyncio.create_task(service.generate(call("a")))
    await turns()
    answer.cancel()
    await turns()
    assert engine.aborted == ["a"]
    retiring = asyncio.create_task(service.retire_version(VersionCall(version=7)))
    await turns()
    assert engine.retired == []
    engine.end("a")
    await retiring
    assert engine.retired == [7]


async def test_a_completion_has_the_engines_tokens_and_frees_its_version(service: RolloutService) -> None:
    engine = service._engine
    assert isinstance(engine, SlowToEnd)
    answer = asyncio.create_task(service.generate(call("a")))
    await turns()
    engine.end("a", "stop")
    completion = (await answer).completion
    assert completion is not None
    assert completion.token_ids.tolist() == [5]
    assert [span.version for span in completion.spans] == [7]
    await service.retire_version(VersionCall(version=7))
    assert engine.retired == [7]


async def test_each_heartbeat_tells_what_was_parked_since_the_one_before(
    service: RolloutService, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, beats = service._engine, list[Heartbeat]()
    assert isinstance(engine, SlowToEnd)

    class Controller:
        async def call(self, method: str, beat: Heartbeat, **_: Any) -> None:
            beats.append(beat)
            engine.parked = {5: 3, 10: 7}.get(len(beats), engine.parked)
            if len(beats) == 20:
                raise EOFError

    monkeypatch.setattr(rollout, "HEARTBEAT_SECONDS", 0)
    monkeypatch.setattr(node, "HEARTBEAT_SECONDS", 0)
    service.supervise(service._look(), "engine health")
    with pytest.raises(EOFError):
        await node._beat(service, Controller())  # type: ignore[arg-type]  # what it calls only
    assert [beat.parked for beat in beats if beat.parked] == [3, 4]
    assert beats[-1].kv_used == 0.5
