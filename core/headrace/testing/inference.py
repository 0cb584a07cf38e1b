"""An inference engine that serves bigram models: true log-probs, several live versions, no tensor library.

Invariant: the token at ``t`` is a function of the version's weights, the token before it, the seed and ``t``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

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
    KVMigration,
    MultiVersion,
    RequestState,
    TinyModels,
    VersionSpan,
    WeightManifest,
    WeightUpdate,
)
from headrace.contract.adapters import adapted_weight, adapter_names, is_adapter, merged
from headrace.errors import EngineError
from headrace.testing.bigram import Bigram, draw, load_bigram, random_bigram
from headrace.testing.trouble import FakeSettings, Trouble


@dataclass(frozen=True, slots=True, kw_only=True)
class FakeInferenceSettings(FakeSettings):
    """A piece of work is a decode step: one token for every request in a slot."""

    slots: int = 8
    live_versions: int = 4
    kv_migration: bool = True
    adapters: bool = True

    def __post_init__(self) -> None:
        FakeSettings.__post_init__(self)
        if self.slots < 1 or self.live_versions < 1:
            raise ValueError(f"slots and live_versions must be at least 1, got {self.slots} and {self.live_versions}")


@dataclass(slots=True)
class Running:
    """A request with what it has so far; ``told``: tokens that were in an output."""

    request: GenerationRequest
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    told: int = 0
    earlier: tuple[VersionSpan, ...] = ()
    """Of the tokens it came with."""
    cached: bool = False
    """Whether all tokens but the newest have been seen by the model."""

    @property
    def spans(self) -> tuple[VersionSpan, ...]:
        """Of all its tokens."""
        start = self.earlier[-1].stop if self.earlier else 0
        own = VersionSpan(version=self.request.version, start=start, stop=len(self.tokens))
        return (*self.earlier, own) if own.stop > start else self.earlier


class FakeInferenceEngine(InferenceEngine, MultiVersion, KVMigration, TinyModels):
    """Requests are admitted and decoded in the order of their submission. The keys and values of a sequence are its
    tokens."""

    Settings = FakeInferenceSettings

    def __init__(self, settings: FakeInferenceSettings) -> None:
        super().__init__(settings)
        self._options = settings
        self._trouble = Trouble(settings, error=EngineError)
        self._base: Bigram | None = None
        """What was started with: the shape of every version."""
        self._models: dict[int, Bigram] = {}
        self._digests: dict[int, str] = {}
        self._updates: dict[int, FakeWeightUpdate] = {}
        self._held: dict[str, tuple[str, Array]] = {}
        """Checksum and tensor of the base that the last version with an adapter has."""
        self._open: dict[str, Running] = {}
        self._outputs: asyncio.Queue[list[GenerationOutput] | None] = asyncio.Queue()
        self._work = asyncio.Event()
        self._decoding: asyncio.Task[None] | None = None
        self._failure: EngineError | None = None
        self._generated = self._prefilled = 0

    @classmethod
    def capabilities(cls, settings: FakeInferenceSettings) -> InferenceCapabilities:
        return InferenceCapabilities(
            slots=settings.slots,
            live_versions=settings.live_versions,
            deterministic=True,
            kv_migration=settings.kv_migration,
            adapters=settings.adapters,
        )

    @classmethod
    def write_tiny_model(cls, path: str) -> None:
        random_bigram(vocabulary=16, max_length=256, seed=0).save(path)

    async def start(self, context: InferenceContext) -> None:
        self._base = self._models[context.version] = load_bigram(context.model_path)
        self._decoding = asyncio.create_task(self._decode())

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        for request in requests:
            self._check(request)
        accepted = [Running(request) for request in requests]
        self._open |= {running.request.request_id: running for running in accepted if self._room(running.request) > 0}
        if over := [self._output(running, "length") for running in accepted if self._room(running.request) < 1]:
            self._outputs.put_nowait(over)
        if self._open:
            self._work.set()

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        while (outputs := await self._outputs.get()) is not None:
            yield outputs
        self._outputs.put_nowait(None)
        if self._failure is not None:
            raise self._failure

    async def abort(self, request_ids: Sequence[str]) -> None:
        ended = [self._open.pop(name) for name in request_ids if name in self._open]
        if ended:
            self._outputs.put_nowait([self._output(running, "aborted") for running in ended])

    async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
        update = FakeWeightUpdate(self, manifest, live=manifest.version in self._models)
        self._updates[manifest.version] = update
        return update

    async def retire(self, version: int) -> None:
        self._models.pop(version, None)
        self._digests.pop(version, None)

    async def health(self) -> EngineHealth:
        if self._failure is not None:
            raise self._failure
        running = min(len(self._open), self._options.slots)
        return EngineHealth(
            versions=tuple(sorted(self._models)),
            running=running,
            waiting=len(self._open) - running,
            kv_used=self._kv_used(),
            generated_tokens=self._generated,
            prefilled_tokens=self._prefilled,
            digests=dict(self._digests),
        )

    def _kv_used(self) -> float:
        """Of what all slots hold at full length."""
        base, slots = self._base, self._options.slots
        running = list(self._open.values())[:slots]
        held = sum(len(each.request.prompt) + len(each.tokens) for each in running)
        return held / (slots * base.max_length) if base is not None else 0.0

    async def close(self) -> None:
        if self._decoding is not None:
            self._decoding.cancel()
            self._decoding = None
        self._open.clear()
        self._outputs.put_nowait(None)

    # ------------------------------------------------------------ migration

    def fingerprint(self, version: int) -> str:
        if version not in self._models:
            raise EngineError(f"version {version} is not live", fix="commit it first")
        return f"{self._models[version].vocabulary} tokens, weights {self._digests.get(version)}"

    async def export_request(self, request_id: str) -> RequestState | None:
        running = self._open.pop(request_id, None)
        if running is None:
            return None
        if not self._open:
            self._work.clear()
        return RequestState(
            request=running.request,
            token_ids=np.array(running.tokens, dtype=np.int32),
            logprobs=np.array(running.logprobs, dtype=np.float32),
            spans=running.spans,
            reported=running.told,
            fingerprint=self.fingerprint(running.request.version) if running.cached else "",
            kv=(_seen(running.request, running.tokens),) if running.cached else (),
        )

    async def import_request(self, state: RequestState) -> None:
        self._check(state.request)
        if problem := self._misfit(state):
            raise EngineError(
                f"request {state.request.request_id!r} cannot go on here: {problem}", fix="move it to a like engine"
            )
        running = Running(
            state.request,
            tokens=state.token_ids.tolist(),
            logprobs=state.logprobs.tolist(),
            told=state.reported,
            earlier=state.spans,
            cached=bool(state.kv),
        )
        self._open[state.request.request_id] = running
        self._work.set()

    def _misfit(self, state: RequestState) -> str:
        count = len(state.token_ids)
        begins, ends = [span.start for span in state.spans], [span.stop for span in state.spans]
        if len(state.logprobs) != count or [*begins, count] != [0, *ends] or not 0 <= state.reported <= count:
            return f"{count} tokens, {len(state.logprobs)} log-probs, spans {begins} to {ends}"
        if not state.kv:
            return ""
        if state.fingerprint != self.fingerprint(state.request.version):
            return f"keys and values of {state.fingerprint}"
        seen = _seen(state.request, state.token_ids.tolist())
        (kv,) = state.kv
        return "" if (kv.dtype, kv.shape) == (seen.dtype, seen.shape) else f"keys and values {kv.dtype} {kv.shape}"

    # ------------------------------------------------------------ decoding

    def _check(self, request: GenerationRequest) -> None:
        if self._decoding is None or request.version not in self._models:
            raise EngineError(
                f"request {request.request_id!r} asks for version {request.version}; live are {sorted(self._models)}",
                fix="commit that version first",
            )

    def _room(self, request: GenerationRequest) -> int:
        """Tokens that the answer may have."""
        return min(request.sampling.max_new_tokens, self._models[request.version].max_length - len(request.prompt))

    async def _decode(self) -> None:
        try:
            while True:
                await self._work.wait()
                await self._trouble.work_async("a decode step")
                self._step()
        except EngineError as failure:
            self._failure = failure
            self._outputs.put_nowait(None)

    def _step(self) -> None:
        outputs: list[GenerationOutput] = []
        for place, running in enumerate(list(islice(self._open.values(), self._options.slots))):
            reason = self._advance(running, place)
            if reason is not None:
                del self._open[running.request.request_id]
            if reason is not None or running.request.stream:
                outputs.append(self._output(running, reason))
        if outputs:
            self._outputs.put_nowait(outputs)
        if not self._open:
            self._work.clear()

    def _advance(self, running: Running, place: int) -> FinishReason | None:
        """One more token; ``place``: the request's slot, on which nothing may depend."""
        request, sampling = running.request, running.request.sampling
        if not running.cached:
            self._prefilled += len(request.prompt) + len(running.tokens)
            running.cached = True
        previous = running.tokens[-1] if running.tokens else int(request.prompt[-1])
        model = self._models[request.version]
        logprobs = model.logprobs(np.array([previous]), temperature=sampling.temperature)[0]
        token = int(logprobs.argmax()) if sampling.greedy else self._draw(logprobs, running, place)
        running.tokens.append(token)
        running.logprobs.append(float(logprobs[token]))
        self._generated += 1
        if token in sampling.stop_token_ids:
            return "stop"
        return "length" if len(running.tokens) >= self._room(request) else None

    def _draw(self, logprobs: Array, running: Running, place: int) -> int:
        return draw(logprobs, seed=running.request.sampling.seed, position=len(running.tokens))

    def _output(self, running: Running, reason: FinishReason | None) -> GenerationOutput:
        start, running.told = running.told, len(running.tokens)
        return GenerationOutput(
            request_id=running.request.request_id,
            token_ids=np.array(running.tokens[start:], dtype=np.int32),
            logprobs=np.array(running.logprobs[start:], dtype=np.float32),
            spans=tuple(replace(s, start=max(s.start, start)) for s in running.spans if s.stop > start),
            finish_reason=reason,
        )

    # ------------------------------------------------------------ updates

    def _commit(self, update: FakeWeightUpdate) -> None:
        version = update.manifest.version
        if self._updates.get(version) is not update:
            raise EngineError(f"the update to version {version} was aborted or replaced", fix="begin it again")
        base = self._base
        assert base is not None, "an update is begun after start"
        wrong = self._problems(update, base)
        if wrong:
            raise EngineError(f"version {version} is incomplete: {'; '.join(wrong)}", fix="apply these tensors again")
        if self._options.live_versions == 1:
            self._models.clear()
            self._digests.clear()
        elif len(self._models) >= self._options.live_versions:
            raise EngineError(f"version {version} would exceed live_versions", fix="retire a version first")
        tensors = update.tensors()
        if any(map(is_adapter, tensors)):
            checksums = {info.name: info.checksum for info in update.manifest.tensors}
            self._held = {n: (checksums[n], t) for n, t in tensors.items() if not is_adapter(n)}
        self._models[version] = base.with_tensors(merged(tensors))
        self._digests[version] = update.manifest.digest
        del self._updates[version]

    def _problems(self, update: FakeWeightUpdate, base: Bigram) -> list[str]:
        """Tensors of the manifest or of the model that are not there in their shape, and adapters that do not fit."""
        found = update.tensors()
        shapes = {name: tensor.shape for name, tensor in base.tensors.items()}
        shapes |= _adapter_shapes(base, {info.name: info.shape for info in update.manifest.tensors})
        return [
            f"{name} of shape {shape} is missing"
            for name, shape in shapes.items()
            if name not in found or found[name].shape != shape
        ]


def _adapter_shapes(base: Bigram, manifest: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
    """Of all that the manifest names, both halves of an adapter where it names one."""
    shapes = dict(manifest)
    for weight in {adapted_weight(name) for name in manifest if is_adapter(name)}:
        a, b = adapter_names(weight)
        rank = manifest.get(a, manifest.get(b, ())[::-1])[0]
        rows, columns = base.tensors[weight].shape
        shapes |= {a: (rank, columns), b: (rows, rank)}
    return shapes


def _seen(request: GenerationRequest, tokens: Sequence[int]) -> Array:
    """int32 [P + T - 1]: what stands for keys and values."""
    return np.concatenate([request.prompt, np.array(tokens[:-1], dtype=np.int32)])


class FakeWeightUpdate(WeightUpdate):
    """``live``: the version was live already, so that there is nothing to do."""

    def __init__(self, engine: FakeInferenceEngine, manifest: WeightManifest, *, live: bool) -> None:
        self.manifest = manifest
        self.staged: dict[str, Array] = {}
        self._engine = engine
        self._done = live
        self._kept: dict[str, Array] = {}
        if any(is_adapter(info.name) for info in manifest.tensors):
            held = [(info.name, engine._held.get(info.name), info.checksum) for info in manifest.tensors]
            self._kept = {name: kept[1] for name, kept, checksum in held if kept and kept[0] == checksum}

    def wants(self, name: str) -> bool:
        return name not in self._kept

    def tensors(self) -> dict[str, Array]:
        """What was staged, and what of the version's base was there."""
        return {**self._kept, **self.staged}

    async def apply(self, name: str, tensor: Array) -> None:
        if not self._done:
            self.staged[name] = np.array(tensor, dtype=np.float32)

    async def commit(self) -> None:
        if not self._done:
            self._engine._commit(self)
            self._done = True

    async def abort(self) -> None:
        if self._engine._updates.get(self.manifest.version) is self:
            del self._engine._updates[self.manifest.version]
