"""An inference engine that computes in other processes, as the node sees it: which requests are open, which version is
served, and whether it still lives.

It serves one policy version at a time: a version that is committed takes the place of the one before it, when none of
its requests is open. Invariant: while a request is open, the weights are those of the version it is pinned to; what
the engine itself reports for its tokens is what is told.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Sequence
from typing import Any, ClassVar

import numpy as np

from headrace.contract.columns import Array
from headrace.contract.generation import EngineHealth, GenerationOutput, GenerationRequest, empty_tokens
from headrace.contract.inference import InferenceContext, InferenceEngine, Scoring, WeightUpdate
from headrace.contract.weights import WeightManifest
from headrace.errors import EngineError, HeadraceError
from headrace_serving.checkpoint import Checkpoint, read_checkpoint
from headrace_serving.staging import StagedWeights
from headrace_serving.update import StagedUpdate


class Backend(ABC):
    """A running engine. Whatever it raises means that it is of no use any more."""

    running = 0
    """Requests that it decodes, as it said last."""
    kv_used = 0.0
    """Share of its memory for keys and values that is in use, as it said last."""
    prefilled_tokens = 0
    """Tokens of prompts that it computed, since start."""

    @abstractmethod
    def answer(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """The outputs of a request, to the last. From this call on it can be aborted."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """Each ends with a last output, whether it has been accepted already or not; those that have ended are
        ignored."""

    @abstractmethod
    async def logprob(self, before: Sequence[int], token: int, *, version: int, temperature: float) -> float:
        """Of ``token`` after ``before``, as if it had been sampled."""

    @abstractmethod
    async def load(self, staged: StagedWeights, version: int) -> None:
        """Take up the staged weights, while nothing is being generated, and serve them as ``version``."""

    @abstractmethod
    async def check(self) -> None:
        """Within a second. Raises what it says when it is dead."""

    @abstractmethod
    async def close(self) -> None:
        """End its processes, if they are its own, and wait for them."""


class ServingEngine(InferenceEngine, Scoring):
    """Subclasses say what they are (``kind``), open their :class:`Backend`, and tell of their settings. What such an
    engine cannot do is not declared: several live versions, requests that move with their keys and values, the same
    batches in every run."""

    kind: ClassVar[str]
    """For messages, such as ``vLLM``."""

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._name = self.kind
        self._backend: Backend | None = None
        self._checkpoint: Checkpoint | None = None
        self._context = 0
        self._failure: EngineError | None = None
        self._outputs: asyncio.Queue[list[GenerationOutput] | None] = asyncio.Queue()
        self._live: dict[int, str | None] = {}
        """The version that is served, and its digest; None for the weights loaded at start."""
        self._open: dict[str, asyncio.Task[None]] = {}
        """Who follows each request that has no last output yet."""
        self._updates: dict[int, StagedUpdate] = {}
        self._turn = asyncio.Lock()
        """Held while weights change, and by whoever relies on those of now."""
        self._generated = 0

    @abstractmethod
    async def open_backend(self, context: InferenceContext, *, length: int) -> Backend:
        """Serving ``context.version``. ``length``: tokens of the longest sequence."""

    async def start(self, context: InferenceContext) -> None:
        """Serve the model at ``context.model_path`` as ``context.version``."""
        if self._backend is not None:
            raise self._error("started twice", fix="construct another engine")
        self._name = context.name
        self._checkpoint = await asyncio.to_thread(read_checkpoint, context.model_path)
        self._context = min(self.settings.max_length or self._checkpoint.context, self._checkpoint.context)
        try:
            self._backend = await self.open_backend(context, length=self._context)
        except HeadraceError:
            raise
        except Exception as error:  # an engine may raise anything: it is told as what it is, with its cause
            raise self._error(f"{self.kind} did not start: {error!r}", fix="see the instance's log above") from error
        self._live[context.version] = None

    # ------------------------------------------------------------ generation

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Accept requests, all or none; the engine gets them in this order."""
        async with self._turn:
            backend = self._serving()
            known = set(self._open)
            for request in requests:
                if request.request_id in known:
                    raise ValueError(f"request {request.request_id!r} is open already")
                known.add(request.request_id)
                self._check(request)
            for request in requests:
                if len(request.prompt) >= self._context:
                    self._outputs.put_nowait([_no_room(request)])
                else:
                    self._open[request.request_id] = asyncio.create_task(self._follow(backend.answer(request)))

    def _check(self, request: GenerationRequest) -> None:
        sampling, prompt = request.sampling, request.prompt
        if not sampling.temperature > 0 or sampling.max_new_tokens < 1 or not 0 <= sampling.seed < 2**63:
            raise ValueError(f"temperature > 0, max_new_tokens >= 1 and 0 <= seed < 2**63 expected, got {sampling}")
        if len(prompt) < 1:
            raise ValueError(f"the prompt of request {request.request_id!r} is empty")
        self._require_live(request.version, f"request {request.request_id!r} asks for version {request.version}")
        assert self._checkpoint is not None
        vocabulary = self._checkpoint.vocabulary
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise self._error(
                f"the prompt of request {request.request_id!r} has token ids outside 0 to {vocabulary - 1} "
                f"(version {request.version})",
                fix="encode prompts with the tokenizer of the model that is served",
            )

    async def _follow(self, answer: AsyncIterator[GenerationOutput]) -> None:
        """Of one request, to its last output."""
        try:
            async for output in answer:
                self._generated += len(output.token_ids)
                if output.finish_reason is not None:
                    del self._open[output.request_id]
                self._outputs.put_nowait([output])
        except Exception as error:  # an engine may raise anything: the instance has failed, and says so to who listens
            self._fail(error)

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        """What has arrived since the last time."""
        while True:
            outputs = await self._outputs.get()
            if outputs is None:
                self._outputs.put_nowait(None)
                if self._failure is not None:
                    raise self._failure
                return
            yield outputs

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their last output follows on :meth:`outputs`."""
        names = [name for name in request_ids if name in self._open]
        if self._backend is None or self._failure is not None or not names:
            return
        try:
            await self._backend.abort(names)
        except Exception as error:  # an engine may raise anything: who listens to the outputs is told
            self._fail(error)

    async def score(self, tokens: Array, *, version: int, temperature: float) -> Array:
        """As if each token had been sampled."""
        async with self._turn:
            backend = self._serving()
            self._require_live(version, f"tokens to score under version {version}")
            ids = tokens.tolist()
            asked = (
                backend.logprob(ids[:place], ids[place], version=version, temperature=temperature)
                for place in range(1, len(ids))
            )
            try:
                rest = await asyncio.gather(*asked)
            except Exception as error:  # an engine may raise anything: the instance has failed
                raise self._fail(error) from error
        return np.array([0.0, *rest][: len(ids)], dtype=np.float32)

    # ------------------------------------------------------------ versions

    async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
        """Make room for a version; the memory of one more model is taken until commit or abort."""
        self._serving()
        assert self._checkpoint is not None
        live = manifest.version in self._live
        staged = None if live else await asyncio.to_thread(StagedWeights, manifest, self._checkpoint)
        update = StagedUpdate(manifest, staged, self._commit)
        if not live:
            earlier = self._updates.get(manifest.version)
            self._updates[manifest.version] = update
            if earlier is not None:
                await earlier.abort()
        return update

    async def _commit(self, manifest: WeightManifest, staged: StagedWeights) -> None:
        """Once begun it is finished, whoever stops waiting for it: the engine cannot go back."""
        loading = asyncio.ensure_future(self._take_up(manifest, staged))
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            await asyncio.wait([loading])
            raise

    async def _take_up(self, manifest: WeightManifest, staged: StagedWeights) -> None:
        async with self._turn:
            backend, version = self._serving(), manifest.version
            if version not in self._live:
                problems = await asyncio.to_thread(staged.problems)
                if problems:
                    raise self._error(
                        f"version {version} is incomplete and was not committed: {'; '.join(problems)}; still live: "
                        f"{sorted(self._live)}",
                        fix="apply the tensors named here as the manifest describes them, then commit again",
                    )
                if self._open:
                    raise self._error(
                        f"version {version} cannot take the place of {sorted(self._live)}: {len(self._open)} requests "
                        "are open",
                        fix="wait for their last outputs, or abort them first",
                    )
                try:
                    await backend.load(staged, version)
                except Exception as error:  # an engine may raise anything: its weights are neither the old nor the new
                    raise self._fail(error) from error
                self._live = {version: manifest.digest}
            self._updates.pop(version, None)

    def _require_live(self, version: int, what: str) -> None:
        if version not in self._live:
            raise self._error(
                f"{what}; live are {sorted(self._live)}", fix="commit that version first, or ask for a live one"
            )

    # ------------------------------------------------------------ life

    async def health(self) -> EngineHealth:
        """As the engine said last."""
        backend = self._serving()
        try:
            await backend.check()
        except Exception as error:  # the engine's own words for being dead
            raise self._fail(error) from error
        running = min(backend.running, len(self._open))
        return EngineHealth(
            versions=tuple(sorted(self._live)),
            running=running,
            waiting=len(self._open) - running,
            kv_used=backend.kv_used,
            generated_tokens=self._generated,
            prefilled_tokens=backend.prefilled_tokens,
            digests={version: digest for version, digest in self._live.items() if digest is not None},
        )

    async def close(self) -> None:
        """End the engine; open requests get no further output."""
        backend, self._backend = self._backend, None
        following = list(self._open.values())
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        for update in list(self._updates.values()):
            await update.abort()
        if backend is not None:
            await backend.close()
        self._live.clear()
        self._open.clear()
        self._updates.clear()
        self._outputs.put_nowait(None)

    def _fail(self, error: Exception) -> EngineError:
        """The instance is of no use any more; the first reason is kept."""
        if self._failure is None:
            fix = getattr(error, "fix", "") or "see the instance's log above; it is started again"
            message = getattr(error, "message", None) or f"{self.kind} failed: {error!r}"
            self._failure = self._error(f"{message} (live versions {sorted(self._live)})", fix=fix)
            self._failure.__cause__ = error
            self._outputs.put_nowait(None)
        return self._failure

    def _serving(self) -> Backend:
        if self._failure is not None:
            raise self._failure
        if self._backend is None:
            raise self._error("not serving", fix="await start() first, and use no engine after close()")
        return self._backend

    def _error(self, message: str, *, fix: str) -> EngineError:
        return EngineError(f"instance {self._name!r}: {message}", origin=f"{type(self).__module__} engine", fix=fix)


def _no_room(request: GenerationRequest) -> GenerationOutput:
    """The prompt fills the context."""
    nothing = empty_tokens()
    return GenerationOutput(
        request_id=request.request_id,
        token_ids=nothing,
        logprobs=nothing.astype(np.float32),
        spans=(),
        finish_reason="length",
    )
