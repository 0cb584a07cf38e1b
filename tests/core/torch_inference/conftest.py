"""Tiny models, requests, and engines that serve them."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from headrace.contract.columns import Array
from headrace.contract.generation import GenerationOutput, GenerationRequest, Sampling, VersionSpan
from headrace.contract.inference import InferenceContext
from headrace_torch.checkpoint import create_weights, load_model, save_model
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.model import Decoder, ModelConfig

DEADLINE = 60.0


def causal_attention(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """One sequence, in the plainest way."""
    q, k, v = (x.transpose(0, 1) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(0, 1)


def full_forward_logprobs(path: str, tokens: Array, *, temperature: float = 1.0) -> Array:
    """float32 [T - 1]: log-probs of tokens 1, 2, … by a plain full forward of the model at ``path``."""
    model = load_model(path, dtype=torch.float32, device="cpu")
    ids = torch.from_numpy(tokens.astype(np.int64))
    with torch.inference_mode():
        hidden = model(ids, torch.arange(len(ids)), causal_attention)
        logprobs = F.log_softmax(model.logits(hidden)[:-1] / temperature, -1)
    result: Array = logprobs.gather(1, ids[1:, None]).squeeze(1).numpy()
    return result


@dataclass
class Answer:
    """All outputs of one request, joined."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    reason: str = ""
    pieces: int = 0

    def add(self, output: GenerationOutput) -> None:
        assert len(output.token_ids) == len(output.logprobs)
        assert sum(s.stop - s.start for s in output.spans) == len(output.token_ids)
        self.tokens += output.token_ids.tolist()
        self.logprobs += output.logprobs.tolist()
        self.spans += output.spans
        self.reason = output.finish_reason or ""
        self.pieces += 1

    def extend(self, more: Answer) -> None:
        self.tokens += more.tokens
        self.logprobs += more.logprobs
        self.spans += more.spans
        self.reason = more.reason
        self.pieces += more.pieces


def join_outputs(outputs: Sequence[GenerationOutput], answers: dict[str, Answer] | None = None) -> dict[str, Answer]:
    answers = {} if answers is None else answers
    for output in outputs:
        answers.setdefault(output.request_id, Answer()).add(output)
    return answers


@dataclass(frozen=True)
class Served:
    """A started engine."""

    engine: TorchInferenceEngine

    async def finish(self, ids: Sequence[str]) -> dict[str, Answer]:
        """Collect outputs until every one of ``ids`` has its last."""
        answers: dict[str, Answer] = {}
        async with asyncio.timeout(DEADLINE):
            async for outputs in self.engine.outputs():
                join_outputs(outputs, answers)
                if all(i in answers and answers[i].reason for i in ids):
                    break
        return answers

    async def generate(self, *requests: GenerationRequest) -> dict[str, Answer]:
        """Submit together and collect everything."""
        await self.engine.submit(requests)
        return await self.finish([r.request_id for r in requests])


def make_request(
    name: object, prompt: Sequence[int] | Array, *, version: int = 0, stream: bool = False, **sampling: Any
) -> GenerationRequest:
    values = {"max_new_tokens": 8, **sampling}
    return GenerationRequest(
        request_id=str(name),
        prompt=np.asarray(prompt, np.int32),
        sampling=Sampling(**values),
        version=version,
        stream=stream,
    )


def random_prompts(count: int, *, seed: int = 0) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 50, rng.integers(1, 10)).astype(np.int32) for _ in range(count)]


@pytest.fixture(scope="session")
def join() -> Callable[..., dict[str, Answer]]:
    """``join(outputs, answers)``: answers by request id."""
    return join_outputs


@pytest.fixture(scope="session")
def request_for() -> Callable[..., GenerationRequest]:
    """``request_for(name, prompt, version=…, stream=…, **sampling)``."""
    return make_request


@pytest.fixture(scope="session")
def prompts() -> Callable[..., list[Array]]:
    """``prompts(count, seed=…)``: of 1 to 9 tokens."""
    return random_prompts


@pytest.fixture(scope="session")
def recompute() -> Callable[..., Array]:
    """``recompute(path, tokens, temperature=…)``: log-probs of tokens 1, 2, … by a plain full forward."""
    return full_forward_logprobs


@pytest.fixture(scope="session")
def causal() -> Callable[[int, Tensor, Tensor, Tensor], Tensor]:
    """Attention within one sequence, in the plainest way."""
    return causal_attention


ModelMaker: TypeAlias = Callable[..., str]
Serve: TypeAlias = Callable[..., AbstractAsyncContextManager[Served]]


@pytest.fixture(scope="session")
def make_model(tmp_path_factory: pytest.TempPathFactory) -> ModelMaker:
    """Writes a model directory; the same arguments give the same directory."""
    made: dict[Any, str] = {}

    def make(seed: int = 0, **changes: Any) -> str:
        key = (seed, *sorted(changes.items()))
        if key not in made:
            made[key] = _write_model(tmp_path_factory.mktemp("model"), seed, changes)
        return made[key]

    return make


def _write_model(path: Path, seed: int, changes: dict[str, Any]) -> str:
    values: dict[str, Any] = {
        "model_type": "qwen3",
        "vocab_size": 50,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 64,
        **changes,
    }
    model = Decoder(ModelConfig(**values))
    create_weights(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(8 if parameter.ndim == 2 else 1)  # far from uniform distributions
    save_model(model, str(path), like=None)
    return str(path)


@pytest.fixture
def serve() -> Serve:
    """``async with serve(path, slots=…) as served``."""

    @asynccontextmanager
    async def serving(path: str, *, version: int = 0, **settings: Any) -> AsyncIterator[Served]:
        engine = TorchInferenceEngine(TorchInferenceSettings(**settings))
        await engine.start(InferenceContext(name="rollout-0", model_path=path, version=version, threads=1))
        try:
            yield Served(engine)
        finally:
            await engine.close()

    return serving
