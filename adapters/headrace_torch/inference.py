"""The ``torch`` inference engine: continuous batching of Hugging Face decoder models, on CPU or one GPU.

The event loop's half: it checks requests, knows which versions are live and which requests are open, and
passes work to the decode thread (:mod:`headrace_torch.decode`). Invariant: a version is live from a
verified commit until its retirement, and it is retired only when none of its requests is open.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from headrace.contract.columns import Array
from headrace.contract.generation import EngineHealth, GenerationOutput, GenerationRequest, RequestState
from headrace.contract.inference import (
    InferenceCapabilities,
    InferenceContext,
    InferenceEngine,
    KVMigration,
    MultiVersion,
    Scoring,
    WeightUpdate,
)
from headrace.contract.model import ModelFacts
from headrace.contract.weights import WeightManifest
from headrace.errors import ConfigError, EngineError
from headrace_torch.device import check_device
from headrace_torch.request_states import kv_fingerprint, state_problems
from headrace_torch.weight_update import TorchWeightUpdate

if TYPE_CHECKING:
    from headrace_torch.decode.adapters import SharedBase
    from headrace_torch.decode.scheduler import Scheduler
    from headrace_torch.decode.session import DecodeSession
    from headrace_torch.decode.staging import StagedWeights

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchInferenceSettings:
    """The ``[rollout]`` table of the ``torch`` engine."""

    slots: int = 64
    """Sequences decoded at once, all policy versions together."""
    max_length: int | None = None
    """Prompt and response tokens of a sequence; the model's own limit when absent."""
    kv_tokens: int | None = None
    """Tokens that there is memory for on the device, all policy versions together, each sequence counted as long as the
    longest of its version. Sequences beyond that wait in host memory, with their keys and values. At least
    ``max_length``; without it, there is memory for all slots at full length under each version."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    device: Literal["cpu", "cuda"] = "cpu"
    live_versions: int = 4
    """Policy versions held at once; each costs the model's size, or with a base that versions share its adapter's, and
    its own keys and values. With 1, a new version replaces the old one, which must have no request open."""

    def __post_init__(self) -> None:
        for name, most in (("slots", 1 << 16), ("live_versions", 1 << 10)):
            if not 1 <= getattr(self, name) <= most:
                raise ValueError(f"{name} must be 1 to {most}, got {getattr(self, name)}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {self.max_length}")
        if self.kv_tokens is not None and self.kv_tokens < (least := self.max_length or 2):
            raise ValueError(f"kv_tokens must be at least {least}, which a sequence may have, got {self.kv_tokens}")


class TorchInferenceEngine(InferenceEngine, MultiVersion, Scoring, KVMigration):
    """Embedded engine: no server, no compilation; made for models that fit one device."""

    Settings = TorchInferenceSettings

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self._options: TorchInferenceSettings = settings
        self._name = "torch"
        self._session: DecodeSession | None = None
        self._failure: EngineError | None = None
        self._outputs: asyncio.Queue[list[GenerationOutput] | None] = asyncio.Queue()
        self._live: dict[int, str | None] = {}
        """Digest of every live version; None for the weights loaded at start."""
        self._open: dict[str, int] = {}
        """Version of every request that has no final output yet."""
        self._base: SharedBase | None = None
        """Of the version committed last, where it is a base and an adapter."""
        self._updates: dict[int, TorchWeightUpdate] = {}
        self._asked: set[asyncio.Future[Any]] = set()
        """Answers that the decode thread owes."""

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        """The device must be there."""
        check_device(settings.device, origin=origin("device"))

    @classmethod
    def capabilities(cls, settings: Any) -> InferenceCapabilities:
        """Several versions at once, deterministic, in the dtype of the settings."""
        return InferenceCapabilities(
            slots=settings.slots,
            live_versions=settings.live_versions,
            deterministic=True,
            scoring=True,
            kv_migration=True,
            dtype=settings.dtype,
            max_length=settings.max_length,
            low_bit=("int8", "int4", "float8_e4m3fn"),
            adapters=True,
        )

    @classmethod
    def check_model(cls, settings: Any, model: ModelFacts, *, origin: Callable[[str], str]) -> None:
        """Memory for one sequence, which where the settings bound none may be as long as the model's longest."""
        kv_tokens, longest = settings.kv_tokens, settings.max_length or model.max_length
        if kv_tokens is not None and longest is not None and kv_tokens < longest:
            raise ConfigError(
                f"kv_tokens = {kv_tokens} is memory for less than one sequence: prompt and answer may have {longest} "
                "tokens, the model's most",
                origin=origin("kv_tokens"),
                fix=f"set kv_tokens to at least {longest} or leave it out, or set max_length to what prompts and "
                "answers need",
            )

    async def start(self, context: InferenceContext) -> None:
        """Load ``context.model_path`` and serve it as ``context.version``."""
        if self._session is not None:
            raise self._error("started twice", fix="construct another engine")
        self._name = context.name
        loop = asyncio.get_running_loop()

        def deliver(outputs: list[GenerationOutput]) -> None:
            loop.call_soon_threadsafe(self._deliver, outputs)

        def closed(failure: Exception | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(self._end, failure)

        self._session = await asyncio.to_thread(_open, self._options, context, deliver, closed)
        self._live[context.version] = None

    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Accept requests, all or none; they are admitted in this order."""
        session = self._serving()
        known = set(self._open)
        for request in requests:
            if request.request_id in known:
                raise ValueError(f"request {request.request_id!r} is open already")
            known.add(request.request_id)
            self._check(request, vocabulary=session.config.vocab_size)
        self._open.update((request.request_id, request.version) for request in requests)
        fresh = [RequestState.unbegun(request) for request in requests]
        session.worker.post(lambda scheduler: scheduler.submit(fresh))

    def _check(self, request: GenerationRequest, *, vocabulary: int) -> None:
        sampling, prompt = request.sampling, request.prompt
        if not sampling.temperature > 0 or sampling.max_new_tokens < 1 or not 0 <= sampling.seed < 2**64:
            raise ValueError(f"temperature > 0, max_new_tokens >= 1 and a 64-bit seed expected, got {sampling}")
        if len(prompt) < 1:
            raise ValueError(f"the prompt of request {request.request_id!r} is empty")
        self._require_live(request.version, f"request {request.request_id!r} asks for version {request.version}")
        if prompt.min() < 0 or prompt.max() >= vocabulary:
            raise self._error(
                f"the prompt of request {request.request_id!r} has token ids outside 0 to {vocabulary - 1} "
                f"(version {request.version})",
                fix="encode prompts with the tokenizer of the model that is served",
            )

    async def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        """Batches of outputs, at most one per decode step."""
        while True:
            outputs = await self._outputs.get()
            if outputs is not None:
                yield outputs
                continue
            self._outputs.put_nowait(None)
            if self._failure is not None:
                raise self._failure
            return

    async def score(self, tokens: Array, *, version: int, temperature: float) -> Array:
        """Between two decode steps."""
        self._require_live(version, f"tokens to score under version {version}")
        return await self._ask(lambda scheduler: scheduler.score(version, tokens, temperature))

    def _require_live(self, version: int, what: str) -> None:
        if version not in self._live:
            raise self._error(
                f"{what}; live are {sorted(self._live)}", fix="commit that version first, or ask for a live one"
            )

    async def _ask(
        self, question: Callable[[Scheduler], T], *, unheard: Callable[[Scheduler, T], None] = lambda _, answer: None
    ) -> T:
        """What the decode thread answers between two steps. ``unheard``: what it does with its answer when whoever
        asked was cancelled meanwhile."""
        session, loop = self._serving(), asyncio.get_running_loop()
        answered: asyncio.Future[T] = loop.create_future()

        def give(answer: T) -> None:
            if answered.done():
                session.worker.post(lambda scheduler: unheard(scheduler, answer))
            else:
                answered.set_result(answer)

        def call(scheduler: Scheduler) -> None:
            loop.call_soon_threadsafe(give, question(scheduler))

        self._asked.add(answered)
        answered.add_done_callback(self._asked.discard)
        session.worker.post(call)
        try:
            return await answered
        except asyncio.CancelledError:
            if answered.done() and not answered.cancelled():  # answered, and cancelled before it was heard
                give(answered.result())
            raise

    def fingerprint(self, version: int) -> str:
        """Of the model's shape, the dtype, the layout and the weights."""
        session = self._serving()
        self._require_live(version, f"the keys and values of version {version} are asked about")
        return kv_fingerprint(session.config, dtype=self._options.dtype, digest=self._live[version])

    async def export_request(self, request_id: str) -> RequestState | None:
        """Between two decode steps."""
        version = self._open.get(request_id)
        if version is None:
            return None
        fingerprint = self.fingerprint(version)
        state = await self._ask(
            lambda scheduler: scheduler.take(request_id, fingerprint=fingerprint),
            unheard=lambda scheduler, state: scheduler.put_back(state),
        )
        if state is not None:
            del self._open[request_id]
        return state

    async def import_request(self, state: RequestState) -> None:
        """It goes before requests that have not begun."""
        session, request = self._serving(), state.request
        if request.request_id in self._open:
            raise ValueError(f"request {request.request_id!r} is open already")
        self._check(request, vocabulary=session.config.vocab_size)
        fingerprint = self.fingerprint(request.version)
        problems = state_problems(state, session.config, dtype=self._options.dtype, fingerprint=fingerprint)
        if problems:
            raise self._error(
                f"request {request.request_id!r} cannot go on here: {'; '.join(problems)}",
                fix="move requests between instances of the same engine, model, dtype and weights",
            )
        self._open[request.request_id] = request.version
        session.worker.post(lambda scheduler: scheduler.submit([state]))

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End requests; their last output follows on :meth:`outputs`. Without a decode thread nothing is open."""
        ids = frozenset(request_ids)
        if self._session is not None:
            self._session.worker.post(lambda scheduler: scheduler.abort(ids))

    async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
        """Make room for a version; the memory of one more model is taken until commit or abort, or that of an adapter
        where its base is there."""
        session = self._serving()
        if manifest.version in self._live:
            return TorchWeightUpdate(self, manifest, None)
        staged = await asyncio.to_thread(session.stage, manifest, self._base)
        update = TorchWeightUpdate(self, manifest, staged)
        earlier = self._updates.get(manifest.version)
        self._updates[manifest.version] = update
        if earlier is not None:
            await earlier.abort()
        return update

    def _commit(self, manifest: WeightManifest, staged: StagedWeights) -> None:
        session = self._serving()
        if manifest.version in self._live:  # an update that began earlier was faster
            self._updates.pop(manifest.version, None)
            return
        live = f"still live: {sorted(self._live)}"
        problems = staged.problems()
        if problems:
            raise self._error(
                f"version {manifest.version} is incomplete and was not committed: {'; '.join(problems)}; {live}",
                fix="apply the tensors named here as the manifest describes them, then commit again",
            )
        if self._options.live_versions == 1:
            for replaced in list(self._live):
                self._retire(session, replaced)
        elif len(self._live) >= self._options.live_versions:
            raise self._error(
                f"version {manifest.version} would exceed live_versions = {self._options.live_versions}; {live}",
                fix="retire a version first, or raise live_versions in the engine's settings",
            )
        version, model = manifest.version, staged.model()
        self._base = staged.base
        session.worker.post(lambda scheduler: scheduler.install(version, model))
        self._live[version] = manifest.digest
        self._updates.pop(version, None)

    async def retire(self, version: int) -> None:
        """Free a version's weights, keys and values."""
        self._retire(self._serving(), version)

    def _retire(self, session: DecodeSession, version: int) -> None:
        if version not in self._live:
            return
        users = Counter(self._open.values())[version]
        if users:
            raise self._error(
                f"version {version} cannot be retired: {users} of its requests are open",
                fix="wait for their last outputs, or abort them first",
            )
        del self._live[version]
        session.worker.post(lambda scheduler: scheduler.retire(version))

    async def health(self) -> EngineHealth:
        """The state after the latest decode step."""
        status = self._serving().worker.status
        running = min(status.running, len(self._open))
        return EngineHealth(
            versions=tuple(sorted(self._live)),
            running=running,
            waiting=len(self._open) - running,
            kv_used=status.kv_used,
            generated_tokens=status.generated_tokens,
            prefilled_tokens=status.prefilled_tokens,
            parked=status.parked,
            digests={version: digest for version, digest in self._live.items() if digest is not None},
        )

    async def close(self) -> None:
        """Stop decoding after the current step; open requests get no further output."""
        session, self._session = self._session, None
        if session is None:
            self._end(None)
            return
        await asyncio.to_thread(session.worker.stop)
        self._base = None
        self._live.clear()
        self._open.clear()
        self._updates.clear()

    def _deliver(self, outputs: list[GenerationOutput]) -> None:
        for output in outputs:
            if output.finish_reason is not None:
                self._open.pop(output.request_id, None)
        self._outputs.put_nowait(outputs)

    def _end(self, failure: Exception | None) -> None:
        if failure is not None:
            fix = getattr(failure, "fix", "") or "see the cause above; restart the instance"
            message = getattr(failure, "message", None) or f"decoding failed: {failure!r}"
            self._failure = self._error(f"{message} (live versions {sorted(self._live)})", fix=fix)
            self._failure.__cause__ = failure
        for answered in list(self._asked):
            if not answered.done():
                answered.set_exception(self._failure or self._error("closed", fix="use no engine after close()"))
        self._outputs.put_nowait(None)

    def _serving(self) -> DecodeSession:
        if self._failure is not None:
            raise self._failure
        if self._session is None:
            raise self._error("not serving", fix="await start() first, and use no engine after close()")
        return self._session

    def _error(self, message: str, *, fix: str) -> EngineError:
        return EngineError(f"instance {self._name!r}: {message}", origin="headrace_torch inference engine", fix=fix)


def _open(settings: TorchInferenceSettings, context: InferenceContext, deliver: Any, closed: Any) -> DecodeSession:
    from headrace_torch.decode.session import SessionOptions, open_session

    options = SessionOptions(
        name=context.name,
        model_path=context.model_path,
        version=context.version,
        threads=context.threads,
        slots=settings.slots,
        max_length=settings.max_length,
        kv_tokens=settings.kv_tokens,
        dtype=settings.dtype,
        device=settings.device,
        quantization=context.quantization,
    )
    return open_session(options, deliver=deliver, closed=closed)
