"""A request that moves between two rollout processes, each with a torch engine."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from headrace.contract import EngineHealth, GenerationRequest, Sampling
from headrace.registry import PluginSpec
from headrace.services.messages import RolloutSetup
from headrace.services.node_messages import Heartbeat, NodeSpec, Registration
from headrace.services.request_messages import GenerateCall, Generated, MoveCall, Moved
from headrace.services.rollout import BASE_VERSION
from headrace.wire import Client, Network, rpc
from headrace_torch.training import TorchTrainingEngine

DEADLINE = 120.0
TOKENS = 600
PROMPT = np.array([3, 1, 4, 1, 5], dtype=np.int32)
MODEL = {
    "architecture": "llama",
    "alphabet": "0123456789abcdefghijklmnopqrstuvwxyz=+-*/ ().",
    "hidden_size": 32,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 48,
    "max_length": 1024,
}


class Registry:
    """What a node wants of a controller."""

    def __init__(self) -> None:
        self.registered: asyncio.Queue[Registration] = asyncio.Queue()

    @rpc
    async def register(self, registration: Registration) -> None:
        self.registered.put_nowait(registration)

    @rpc
    async def heartbeat(self, beat: Heartbeat) -> None:
        return


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    tmp_path.chmod(0o700)
    TorchTrainingEngine.create_model(str(tmp_path / "model"), settings=MODEL, seed=7)
    return tmp_path


def write_spec(folder: Path, network: Network, controller: str, name: str) -> str:
    setup = RolloutSetup(
        engine=PluginSpec(role="inference_engine", use="headrace_torch.inference:TorchInferenceEngine", settings={}),
        transport=PluginSpec(role="weight_transport", use="headrace.testing:FakeWeightTransport", settings={}),
        model_path=str(folder / "model"),
        publisher=str(folder),
        threads=1,
    )
    spec = NodeSpec(
        name=name, role="rollout", start=0, controller=controller, network=network, setup=msgspec.msgpack.encode(setup)
    )
    path = folder / f"{name}.json"
    path.write_bytes(msgspec.json.encode(spec))
    return str(path)


@pytest.fixture
async def instances(folder: Path) -> AsyncIterator[dict[str, Client]]:
    """Two processes: address → client."""
    network, registry = Network.create(str(folder)), Registry()
    server = network.server(registry, name="controller")
    controller = await server.start()
    specs = [write_spec(folder, network, controller, f"rollout-{number}") for number in range(2)]
    nodes = [
        await asyncio.create_subprocess_exec(sys.executable, "-m", "headrace.services.node", spec) for spec in specs
    ]
    clients: dict[str, Client] = {}
    try:
        async with asyncio.timeout(DEADLINE):
            for _ in nodes:
                address = (await registry.registered.get()).address
                clients[address] = network.client(address)
        yield clients
    finally:
        for client in clients.values():
            await client.close()
        for node in nodes:
            node.terminate()
            await node.wait()
        await server.close()


def asking(name: str) -> GenerateCall:
    request = GenerationRequest(
        request_id=name, prompt=PROMPT, sampling=Sampling(max_new_tokens=TOKENS, seed=11), version=BASE_VERSION
    )
    return GenerateCall(request=request, trajectory=5, movable=True)


async def health(client: Client) -> EngineHealth:
    found: EngineHealth = await client.call("health", reply=EngineHealth, deadline=DEADLINE)
    return found


async def test_DORA8_a_request_that_moved_to_another_process_equals_one_that_did_not_bit_for_bit(
    instances: dict[str, Client],
) -> None:
    (_, source), (home, target) = instances.items()
    unmoved = (await source.call("generate", asking("unmoved"), reply=Generated, deadline=DEADLINE)).completion
    assert unmoved is not None
    answer = source.submit("generate", asking("moved"), reply=Generated, deadline=DEADLINE)
    while (await health(source)).generated_tokens < TOKENS + TOKENS // 10:
        assert not answer.done()
    call = MoveCall(trajectory=5, attempt=0, version=BASE_VERSION, target=home)
    moved = await source.call("move", call, reply=Moved, deadline=DEADLINE)
    assert len(PROMPT) + TOKENS // 10 <= moved.tokens < len(PROMPT) + TOKENS, "it was in the middle of its answer"
    assert (await answer).moved == home
    went_on = (await target.call("generate", asking("moved"), reply=Generated, deadline=DEADLINE)).completion
    assert went_on is not None
    assert len(went_on.token_ids) == TOKENS
    assert went_on.token_ids.tolist() == unmoved.token_ids.tolist()
    assert went_on.logprobs.tobytes() == unmoved.logprobs.tobytes()
    assert [(s.version, s.start, s.stop) for s in went_on.spans] == [(BASE_VERSION, 0, TOKENS)]
    assert moved.prefilled_tokens == 0
    assert (await health(target)).prefilled_tokens == 0
    layers, kv_heads, width, size = 2, 2, 8, 4
    assert moved.nbytes == (moved.tokens - 1) * layers * 2 * kv_heads * width * size
    assert (await health(source)).running == 0
