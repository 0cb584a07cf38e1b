"""Drives an inference engine for its suite: requests in, whole answers out, weights of a second policy."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.contract import (
    Array,
    GenerationOutput,
    GenerationRequest,
    InferenceContext,
    InferenceEngine,
    Sampling,
    VersionSpan,
    WeightManifest,
    WeightUpdate,
)
from headrace.testing.suites.rules import check
from headrace.testing.tensors import read_tensors
from headrace.wire import manifest_digest, tensor_info

Tensors = Mapping[str, Array]


@dataclass(slots=True)
class Answer:
    """All outputs of one request, joined; ``reason``: empty before the last one."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    outputs: list[GenerationOutput] = field(default_factory=list)
    reason: str = ""

    def add(self, output: GenerationOutput) -> None:
        """The next output."""
        self.tokens += output.token_ids.tolist()
        self.logprobs += output.logprobs.tolist()
        self.spans += output.spans
        self.outputs.append(output)
        self.reason = output.finish_reason or ""


class Served:
    """A started engine. Its outputs have one consumer, which is this object."""

    def __init__(self, engine: InferenceEngine, model_path: str, *, deadline: float) -> None:
        self.engine = engine
        self.answers: dict[str, Answer] = {}
        self.closed = False
        self._outputs = engine.outputs()
        self._deadline = deadline
        config = json.loads((Path(model_path) / "config.json").read_text())
        self.vocabulary: int = config["vocab_size"]
        self.context: int = config["max_position_embeddings"]

    def prompts(self, count: int) -> list[Array]:
        """Of 1 to 4 tokens, the same every time."""
        generator = np.random.default_rng(0)
        return [
            generator.integers(self.vocabulary // 4, self.vocabulary, 1 + n % 4).astype(np.int32) for n in range(count)
        ]

    def requests(self, name: str, count: int, **changes: Any) -> list[GenerationRequest]:
        """``count`` requests ``NAME-0`` … with a prompt and a seed of their own; see :func:`request`."""
        return [
            request(f"{name}-{n}", prompt, **{"seed": n, **changes}) for n, prompt in enumerate(self.prompts(count))
        ]

    async def generate(self, *requests: GenerationRequest) -> list[Answer]:
        """Submit together and wait for every answer, in the order of ``requests``."""
        await self.engine.submit(requests)
        return await self.finish([r.request_id for r in requests])

    async def finish(self, ids: Sequence[str]) -> list[Answer]:
        """Wait until every request of ``ids`` has its last output; their answers are forgotten after that."""
        while waiting := [name for name in ids if name not in self.answers or not self.answers[name].reason]:
            await self.next_outputs(f"the last output of {', '.join(waiting[:3])}")
        return [self.answers.pop(name) for name in ids]

    async def next_outputs(self, awaited: str) -> list[GenerationOutput] | None:
        """None when the outputs have ended."""
        try:
            async with asyncio.timeout(self._deadline):
                outputs = await anext(self._outputs, None)
        except TimeoutError:
            check(False, f"nothing arrived within {self._deadline:g} s, awaiting {awaited}")
            raise
        for output in outputs or ():
            self.answers.setdefault(output.request_id, Answer()).add(output)
        return outputs

    async def stage(self, tensors: Tensors, version: int) -> WeightUpdate:
        """An update with every tensor applied."""
        update = await self.engine.begin_update(manifest_of(tensors, version))
        for name, tensor in tensors.items():
            await update.apply(name, tensor)
        return update

    async def push(self, tensors: Tensors, version: int) -> None:
        """Stage and commit."""
        await (await self.stage(tensors, version)).commit()

    async def close(self) -> None:
        """Once, unless a rule closed the engine itself."""
        if not self.closed:
            self.closed = True
            await self.engine.close()


@asynccontextmanager
async def serving(plugin: InferenceEngine, model_path: str, *, deadline: float) -> AsyncIterator[Served]:
    """``plugin`` started with the model as version 0, and closed at the end. ``deadline``: seconds per output."""
    await plugin.start(InferenceContext(name="rollout-0", model_path=model_path, version=0, threads=1))
    served = Served(plugin, model_path, deadline=deadline)
    try:
        yield served
    finally:
        await served.close()


def request(
    name: str, prompt: Array, *, version: int = 0, stream: bool = False, max_new_tokens: int = 12, **sampling: Any
) -> GenerationRequest:
    """``sampling``: further fields of :class:`Sampling`."""
    return GenerationRequest(
        request_id=name,
        prompt=prompt,
        sampling=Sampling(max_new_tokens=max_new_tokens, **sampling),
        version=version,
        stream=stream,
    )


def other_policy(model_path: str, *, seed: int = 1) -> dict[str, Array]:
    """The model's weights, each matrix disturbed by half its own size: another policy of the same shape."""
    generator = np.random.default_rng(seed)
    return {
        name: tensor
        if tensor.ndim < 2
        else (tensor + 0.5 * tensor.astype(np.float32).std() * generator.standard_normal(tensor.shape)).astype(
            tensor.dtype
        )
        for name, tensor in read_tensors(model_path).items()
    }


def manifest_of(tensors: Tensors, version: int) -> WeightManifest:
    """What a publisher would say of these tensors."""
    infos = tuple(tensor_info(name, np.ascontiguousarray(tensor)) for name, tensor in tensors.items())
    return WeightManifest(
        version=version, tensors=infos, nbytes=sum(t.nbytes for t in tensors.values()), digest=manifest_digest(infos)
    )


def differ(one: Answer, other: Answer, *, atol: float) -> str:
    """How two answers differ in tokens, or by more than ``atol`` nats; empty when they do not."""
    if one.tokens != other.tokens:
        return f"tokens {one.tokens} and {other.tokens}"
    gap = max((abs(a - b) for a, b in zip(one.logprobs, other.logprobs, strict=True)), default=0.0)
    return f"log-probs that are up to {gap:.3g} nats apart" if gap > atol else ""
