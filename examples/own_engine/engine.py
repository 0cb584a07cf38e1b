"""An engine on `transformers`: any causal language model, one policy version, the whole of the contract.

It keeps no keys and values, so that each step computes every token again: made to be read, not to be fast.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import numpy as np

from headrace.contract import (
    Array,
    EngineHealth,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    InferenceCapabilities,
    InferenceContext,
    InferenceEngine,
    Scoring,
    Setup,
    VersionSpan,
    WeightManifest,
    WeightUpdate,
)
from headrace.errors import EngineError


@dataclass(frozen=True)
class Loaded:
    """What is served: a model of `transformers`, the version that its weights are, and their digest."""

    network: Any
    version: int
    digest: str = ""


@dataclass
class Running:
    """A request, and its answer so far. ``room``: tokens that the answer may have; ``told``: those in outputs."""

    request: GenerationRequest
    room: int
    version: int = -1
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    told: int = 0

    def output(self, reason: FinishReason | None) -> GenerationOutput:
        """What has come since the last one. The version is that of the weights, not what the request asked for."""
        start, self.told = self.told, len(self.tokens)
        return GenerationOutput(
            request_id=self.request.request_id,
            token_ids=np.array(self.tokens[start:], np.int32),
            logprobs=np.array(self.logprobs[start:], np.float32),
            spans=(VersionSpan(version=self.version, start=start, stop=self.told),) if self.told > start else (),
            finish_reason=reason,
        )


class OwnEngine(InferenceEngine, Scoring):
    """One task decodes; each step is computed in a thread, so that the event loop answers meanwhile."""

    @dataclass(frozen=True, slots=True, kw_only=True)
    class Settings:
        """``slots``: requests decoded at once."""

        slots: int = 16

    def __init__(self, settings: Settings) -> None:
        super().__init__(settings)
        self._loaded: Loaded | None = None
        self._failure: EngineError | None = None
        self._decoding: asyncio.Task[None] | None = None
        self._work = asyncio.Event()
        self._outputs: asyncio.Queue[list[GenerationOutput] | None] = asyncio.Queue()
        self._open: dict[str, Running] = {}
        self._updates: dict[int, OwnUpdate] = {}
        self._generated = 0

    @classmethod
    def capabilities(cls, settings: Settings) -> InferenceCapabilities:
        return InferenceCapabilities(slots=settings.slots, scoring=True)

    @classmethod
    def setup(cls) -> Setup:
        return Setup(requirements=("torch==2.13.0", "transformers==5.24.0"), distributions=("torch", "transformers"))

    async def start(self, context: InferenceContext) -> None:
        self._loaded = await asyncio.to_thread(load, context)
        self._decoding = asyncio.create_task(self._decode())

    async def close(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()
        self._loaded = None
        self._open.clear()
        self._outputs.put_nowait(None)

    async def health(self) -> EngineHealth:
        loaded, running = self._serving(), min(len(self._open), self.settings.slots)
        return EngineHealth(
            versions=(loaded.version,),
            running=running,
            waiting=len(self._open) - running,
            kv_used=0.0,
            generated_tokens=self._generated,
            digests={loaded.version: loaded.digest} if loaded.digest else {},
        )

    def _serving(self, version: int | None = None) -> Loaded:
        if self._loaded is None:
            raise self._failure or EngineError("the engine does not serve", fix="start it; never use it after close")
        if version not in (None, self._loaded.version):
            raise EngineError(f"version {version} is not live, {self._loaded.version} is", fix="commit it first")
        return self._loaded

    # ------------------------------------------------------------ generation

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._serving(request.version)  # before any is accepted
        for request in requests:
            longest = self._serving().network.config.max_position_embeddings
            running = Running(request, room=min(request.sampling.max_new_tokens, longest - len(request.prompt)))
            if running.room > 0:
                self._open[request.request_id] = running
                self._work.set()
            else:
                self._outputs.put_nowait([running.output("length")])

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        while (outputs := await self._outputs.get()) is not None:
            yield outputs
        if self._failure is not None:
            raise self._failure

    async def abort(self, request_ids: Sequence[str]) -> None:
        ended = [self._open.pop(name) for name in request_ids if name in self._open]
        self._outputs.put_nowait([running.output("aborted") for running in ended])

    async def score(self, tokens: Array, *, version: int, temperature: float) -> Array:
        return await asyncio.to_thread(score, self._serving(version).network, tokens, temperature)

    async def _decode(self) -> None:
        try:
            while await self._work.wait():
                loaded, batch = self._serving(), list(islice(self._open.values(), self.settings.slots))
                if not batch:
                    self._work.clear()
                    continue
                sampled = await asyncio.to_thread(sample, loaded.network, batch)
                self._outputs.put_nowait(list(self._taken(loaded.version, zip(batch, *sampled, strict=True))))
        except Exception as error:  # an engine may raise anything: it is told by `outputs` and `health`
            self._failure = EngineError(f"decoding failed: {error!r}", fix="see the node's log")
            self._loaded, self._failure.__cause__ = None, error
            self._outputs.put_nowait(None)

    def _taken(self, version: int, sampled: Iterable[tuple[Running, int, float]]) -> Iterable[GenerationOutput]:
        for running, token, logprob in sampled:
            request = running.request
            if self._open.get(request.request_id) is not running:
                continue  # it was aborted while this was computed
            running.version = version
            running.tokens.append(token)
            running.logprobs.append(logprob)
            self._generated += 1
            reason: FinishReason | None = "length" if len(running.tokens) == running.room else None
            if token in request.sampling.stop_token_ids:
                reason = "stop"
            if reason is not None:
                del self._open[request.request_id]
            if reason is not None or request.stream:
                yield running.output(reason)

    # ------------------------------------------------------------ weights

    async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
        if manifest.version == self._serving().version:
            return OwnUpdate(self, manifest, live=True)
        self._updates[manifest.version] = OwnUpdate(self, manifest, live=False)
        return self._updates[manifest.version]

    async def commit(self, update: OwnUpdate) -> None:
        """Serve what was staged. Nothing changes before the last line that can fail."""
        loaded, version = self._serving(), update.manifest.version
        if self._updates.get(version) is not update:
            raise EngineError(f"the update to version {version} was aborted or replaced", fix="begin it again")
        fresh = await asyncio.to_thread(with_weights, loaded.network, update)
        if self._open:
            raise EngineError(f"version {loaded.version} has {len(self._open)} open requests", fix="let them end first")
        self._loaded = Loaded(fresh, version, update.manifest.digest)
        del self._updates[version]

    def forget(self, update: OwnUpdate) -> None:
        """It was aborted."""
        if self._updates.get(update.manifest.version) is update:
            del self._updates[update.manifest.version]


class OwnUpdate(WeightUpdate):
    """Tensors that wait until all are there. ``live``: so is the version, and there is nothing to do."""

    def __init__(self, engine: OwnEngine, manifest: WeightManifest, *, live: bool) -> None:
        self.manifest, self.staged = manifest, dict[str, Array]()
        self._engine, self._done = engine, live

    async def apply(self, name: str, tensor: Array) -> None:
        if not self._done:  # a copy: the array is the transport's. Every bfloat16 is a float32 too
            self.staged[name] = await asyncio.to_thread(np.array, tensor, np.float32)

    async def commit(self) -> None:
        if not self._done:
            await self._engine.commit(self)
            self._done = True

    async def abort(self) -> None:
        self._engine.forget(self)


def load(context: InferenceContext) -> Loaded:
    """In a thread. EngineError when there is no model at the path."""
    import torch
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(context.threads)
    try:
        network = AutoModelForCausalLM.from_pretrained(context.model_path, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise EngineError(f"{context.model_path} cannot be loaded: {error}", fix="name a causal model") from error
    return Loaded(network.eval().requires_grad_(False), context.version)


def with_weights(network: Any, update: OwnUpdate) -> Any:
    """Another model with the update's weights. EngineError unless they are all of the model's, each in its shape."""
    import torch

    fresh = copy.deepcopy(network)
    parameters = dict(fresh.named_parameters())  # those that are tied under one name, as they are published
    shapes = [
        {name: tuple(parameter.shape) for name, parameter in parameters.items()},
        {info.name: tuple(info.shape) for info in update.manifest.tensors},
        {name: tensor.shape for name, tensor in update.staged.items()},
    ]
    wrong = [name for name in sorted(set().union(*shapes)) if len({each.get(name) for each in shapes}) > 1]
    if wrong:
        told = "; ".join(f"{name} {' | '.join(str(each.get(name)) for each in shapes)}" for name in wrong)
        raise EngineError(
            f"version {update.manifest.version} is not of this model: in model | manifest | update are {told}",
            fix="apply every tensor of the manifest, under the name and in the shape that the model has",
        )
    for name, parameter in parameters.items():
        parameter.copy_(torch.from_numpy(update.staged[name]))
    return fresh


def logits(network: Any, sequences: Sequence[Array]) -> Any:
    """Float32 [n, T, V]. Padding comes after a sequence, where a causal model does not look."""
    import torch
    from torch.nn.utils.rnn import pad_sequence

    padded = pad_sequence([torch.from_numpy(each.astype(np.int64)) for each in sequences], batch_first=True)
    with torch.inference_mode():
        return network(input_ids=padded, use_cache=False).logits.float()


def sample(network: Any, batch: Sequence[Running]) -> tuple[list[int], list[float]]:
    """The next token of each request, and its log-prob at the sampling temperature."""
    import torch

    samplings = [running.request.sampling for running in batch]
    sequences = [np.concatenate([running.request.prompt, np.array(running.tokens, np.int32)]) for running in batch]
    last = torch.tensor([len(sequence) - 1 for sequence in sequences])
    temperatures = torch.tensor([[sampling.temperature] for sampling in samplings])
    logprobs = torch.log_softmax(logits(network, sequences)[torch.arange(len(batch)), last] / temperatures, -1)
    # The draw of token t is a number of (seed, t) alone, looked up in the distribution: no batch changes it.
    shares = [np.random.default_rng((s.seed, len(r.tokens))).random() for s, r in zip(samplings, batch, strict=True)]
    below = logprobs.exp().cumsum(-1, dtype=torch.float64)
    drawn = torch.searchsorted(below, torch.tensor(shares, dtype=torch.float64)[:, None] * below[:, -1:], right=True)
    greedy = torch.tensor([[sampling.greedy] for sampling in samplings])
    tokens = torch.where(greedy, logprobs.argmax(-1, keepdim=True), drawn.clamp(max=logprobs.shape[1] - 1))
    return tokens.flatten().tolist(), logprobs.gather(1, tokens).flatten().tolist()


def score(network: Any, tokens: Array, temperature: float) -> Array:
    """See :class:`headrace.contract.Scoring`."""
    import torch

    logprobs = torch.log_softmax(logits(network, [tokens])[0, :-1] / temperature, -1)
    given = torch.from_numpy(tokens[1:].astype(np.int64))[:, None]
    return np.concatenate([np.zeros(1, np.float32), logprobs.gather(1, given).flatten().numpy()])
