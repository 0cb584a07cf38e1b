"""The ``vllm`` inference engine: an ``AsyncLLM`` in the node's process, whose core runs in a process beside it, or a
running server that is reached by its address.

It serves one policy version at a time: a version that is committed takes the place of the one before it, when none of
its requests is open. Invariant: while a request is open, the weights are those of the version it is pinned to; what
vLLM itself reports for its tokens is what is told.
"""

from __future__ import annotations

import asyncio
import importlib.util
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.contract.columns import Array
from headrace.contract.generation import EngineHealth, GenerationOutput, GenerationRequest, empty_tokens
from headrace.contract.inference import (
    InferenceCapabilities,
    InferenceContext,
    InferenceEngine,
    Scoring,
    WeightUpdate,
)
from headrace.contract.setup import Setup
from headrace.contract.weights import WeightManifest
from headrace.errors import EngineError, HeadraceError, PluginError
from headrace_serving.checkpoint import Checkpoint, read_checkpoint
from headrace_serving.staging import StagedWeights
from headrace_serving.update import StagedUpdate
from headrace_vllm.attached import attach
from headrace_vllm.core import Core, Vllm
from headrace_vllm.launch import CPU_SETUP, TESTED, open_engine, set_environment
from headrace_vllm.own import OwnVllm
from headrace_vllm.server import Wanted
from headrace_vllm.settings import VllmInferenceSettings
from headrace_vllm.stats import LatestStats
from headrace_vllm.tokens import Answer


@dataclass(slots=True, eq=False)
class _Open:
    """A request that has no last output yet."""

    answer: Answer
    following: asyncio.Task[None] | None = None
    added: bool = False
    """vLLM has it."""
    aborted: bool = False


class VllmInferenceEngine(InferenceEngine, Scoring):
    """vLLM as it is released. What it cannot do is not declared: several live versions, requests that move with their
    keys and values, the same batches in every run."""

    Settings = VllmInferenceSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._options: VllmInferenceSettings = settings
        self._name = "vllm"
        self._core: Core | None = None
        self._checkpoint: Checkpoint | None = None
        self._context = 0
        self._stats = LatestStats()
        self._failure: EngineError | None = None
        self._outputs: asyncio.Queue[list[GenerationOutput] | None] = asyncio.Queue()
        self._live: dict[int, str | None] = {}
        """The version that is served, and its digest; None for the weights loaded at start."""
        self._open: dict[str, _Open] = {}
        self._updates: dict[int, StagedUpdate] = {}
        self._turn = asyncio.Lock()
        """Held while weights change, and by whoever relies on those of now."""
        self._generated = 0
        self._scored = 0

    @classmethod
    def setup(cls) -> Setup:
        """For CPUs. On a GPU vLLM is installed as its own page says."""
        return CPU_SETUP

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        """vLLM must be there, or what reaches a server of it. A folder of that name where the command is given looks
        like a package, without origin."""
        if settings.addresses:
            if importlib.util.find_spec("aiohttp") is None:
                raise PluginError(
                    "inference_engine 'vllm' needs aiohttp to reach a server by its address",
                    origin=origin("address"),
                    fix="pip install aiohttp, or give an interpreter that has vLLM, which comes with it",
                )
            return
        spec = importlib.util.find_spec("vllm")
        if spec is None or spec.origin is None:
            raise PluginError(
                "inference_engine 'vllm' needs vLLM, which this interpreter does not have",
                fix="headrace env create vllm makes an interpreter that has it, for rollout.python; tested: vLLM "
                + ", ".join(TESTED),
            )

    @classmethod
    def capabilities(cls, settings: Any) -> InferenceCapabilities:
        """One version at a time."""
        return InferenceCapabilities(
            instances=len(settings.addresses) or None,
            slots=settings.slots,
            scoring=True,
            dtype=settings.dtype,
            max_length=settings.max_length,
        )

    async def start(self, context: InferenceContext) -> None:
        """Start vLLM with ``context.model_path`` and serve it as ``context.version``. A server of whatever weights is
        said to serve that version; it must be of the same model."""
        if self._core is not None:
            raise self._error("started twice", fix="construct another engine")
        self._name = context.name
        self._checkpoint = await asyncio.to_thread(read_checkpoint, context.model_path)
        self._context = min(self._options.max_length or self._checkpoint.context, self._checkpoint.context)
        try:
            self._core = Core(await self._reach_vllm(context), context=self._context)
            await self._core.label(context.version)
        except HeadraceError:
            raise
        except Exception as error:  # vLLM may raise anything: it is told as what it is, with its cause
            raise self._error(f"vLLM did not start: {error!r}", fix="see the instance's log above") from error
        self._live[context.version] = None

    async def _reach_vllm(self, context: InferenceContext) -> Vllm:
        options = self._options
        if options.addresses:
            wanted = Wanted(slots=options.slots, context=self._context, dtype=options.dtype)
            return await attach(options.addresses, context.model_path, wanted, self._stats)
        set_environment(threads=context.threads)
        # In a thread that lives as long as the event loop: vLLM's processes end with it.
        engine = await asyncio.to_thread(
            open_engine, options, model_path=context.model_path, max_length=self._context, stats=self._stats
        )
        return OwnVllm(engine)

    # ------------------------------------------------------------ generation

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Accept requests, all or none; vLLM gets them in this order."""
        async with self._turn:
            core = self._serving()
            known = set(self._open)
            for request in requests:
                if request.request_id in known:
                    raise ValueError(f"request {request.request_id!r} is open already")
                known.add(request.request_id)
                self._check(request)
            for request in requests:
                if len(request.prompt) >= self._context:
                    self._outputs.put_nowait([_no_room(request)])
                    continue
                entry = self._open[request.request_id] = _Open(Answer(request))
                entry.following = asyncio.create_task(self._follow(core, request, entry))

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

    async def _follow(self, core: Core, request: GenerationRequest, entry: _Open) -> None:
        """From vLLM's acceptance of a request to its last output."""
        try:
            before = None if core.tells_versions else await core.version()
            replies = await core.add(request)
            try:
                entry.added = True
                if entry.aborted:
                    await core.abort([request.request_id])
                while request.request_id in self._open:
                    reply = replies.get_nowait() or await replies.get()
                    served = None if before is None or not reply.finished else (before, await core.version())
                    self._deliver(entry.answer.output(reply, served=served))
            finally:
                replies.close()
        except Exception as error:  # vLLM may raise anything: the instance has failed, and says so to who listens
            self._fail(error)

    def _deliver(self, output: GenerationOutput) -> None:
        self._generated += len(output.token_ids)
        if output.finish_reason is not None:
            del self._open[output.request_id]
        self._outputs.put_nowait([output])

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
        entries = [(name, self._open[name]) for name in request_ids if name in self._open]
        for _, entry in entries:
            entry.aborted = True  # one that vLLM has yet to accept is aborted as soon as it has
        added = [name for name, entry in entries if entry.added]
        if self._core is None or self._failure is not None or not added:
            return
        try:
            await self._core.abort(added)
        except Exception as error:  # vLLM may raise anything: who listens to the outputs is told
            self._fail(error)

    async def score(self, tokens: Array, *, version: int, temperature: float) -> Array:
        """As if each token had been sampled."""
        async with self._turn:
            core = self._serving()
            self._require_live(version, f"tokens to score under version {version}")
            ids = tokens.tolist()
            self._scored += 1
            asked = (
                core.logprob(
                    ids[:place],
                    ids[place],
                    version=version,
                    temperature=temperature,
                    name=f"score {self._scored} {place}",
                )
                for place in range(1, len(ids))
            )
            try:
                rest = await asyncio.gather(*asked)
            except Exception as error:  # vLLM may raise anything: the instance has failed
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
        """Once begun it is finished, whoever stops waiting for it: vLLM cannot go back."""
        loading = asyncio.ensure_future(self._take_up(manifest, staged))
        try:
            await asyncio.shield(loading)
        except asyncio.CancelledError:
            await asyncio.wait([loading])
            raise

    async def _take_up(self, manifest: WeightManifest, staged: StagedWeights) -> None:
        async with self._turn:
            core, version = self._serving(), manifest.version
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
                    await core.load(staged.update_info(), version)
                except Exception as error:  # vLLM may raise anything: its weights are neither the old nor the new
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
        """The state after the latest step."""
        core = self._serving()
        try:
            await core.check()
        except Exception as error:  # vLLM's own words for being dead
            raise self._fail(error) from error
        running = min(self._stats.running, len(self._open))
        return EngineHealth(
            versions=tuple(sorted(self._live)),
            running=running,
            waiting=len(self._open) - running,
            kv_used=self._stats.kv_used,
            generated_tokens=self._generated,
            prefilled_tokens=self._stats.prefilled_tokens,
            digests={version: digest for version, digest in self._live.items() if digest is not None},
        )

    async def close(self) -> None:
        """End vLLM; open requests get no further output."""
        core, self._core = self._core, None
        following = [entry.following for entry in self._open.values() if entry.following is not None]
        for task in following:
            task.cancel()
        await asyncio.gather(*following, return_exceptions=True)
        for update in list(self._updates.values()):
            await update.abort()
        if core is not None:
            await core.close()
        self._live.clear()
        self._open.clear()
        self._updates.clear()
        self._outputs.put_nowait(None)

    def _fail(self, error: Exception) -> EngineError:
        """The instance is of no use any more; the first reason is kept."""
        if self._failure is None:
            fix = getattr(error, "fix", "") or "see the instance's log above; it is started again"
            message = getattr(error, "message", None) or f"vLLM failed: {error!r}"
            self._failure = self._error(f"{message} (live versions {sorted(self._live)})", fix=fix)
            self._failure.__cause__ = error
            self._outputs.put_nowait(None)
        return self._failure

    def _serving(self) -> Core:
        if self._failure is not None:
            raise self._failure
        if self._core is None:
            raise self._error("not serving", fix="await start() first, and use no engine after close()")
        return self._core

    def _error(self, message: str, *, fix: str) -> EngineError:
        return EngineError(f"instance {self._name!r}: {message}", origin="headrace_vllm inference engine", fix=fix)


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
