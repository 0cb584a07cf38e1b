"""The ``inference_engine`` role: token ids in, streamed tokens with behaviour log-probs out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.contract.columns import Array
from headrace.contract.generation import EngineHealth, GenerationOutput, GenerationRequest, RequestState
from headrace.contract.model import ModelFacts
from headrace.contract.plugin import Plugin
from headrace.contract.quantization import LowBit, Quantization
from headrace.contract.weights import WeightManifest


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceCapabilities:
    """What an engine with given settings can do; read before anything starts."""

    instances: int | None = None
    """How many of it a job can have; None: as many as there is room for."""
    slots: int = 1
    """Requests it decodes at the same time."""
    live_versions: int = 1
    """Policy versions it can serve at the same time; above 1 it is :class:`MultiVersion`."""
    deterministic: bool = False
    """Requests submitted together are admitted in that order and decoded in the same batches."""
    scoring: bool = False
    """It gives log-probs of tokens that it is handed: it is :class:`Scoring`."""
    kv_migration: bool = False
    """Its requests can go on in another instance of it: it is :class:`KVMigration`. Without it a request that moves is
    prefilled again."""
    dtype: str = "float32"
    """What it computes in; decides how closely its log-probs can match a trainer's."""
    max_length: int | None = None
    """Tokens of the longest sequence, prompt and answer together; None: as many as the model's own."""
    low_bit: tuple[LowBit, ...] = ()
    """Kinds of low-bit weights that it multiplies by as they arrive."""
    adapters: bool = False
    """It serves versions that are a base and an adapter (:mod:`headrace.contract.adapters`), and takes a base that it
    has from an earlier version once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InferenceContext:
    """What core tells an engine at start."""

    name: str
    """The instance's name, for messages."""
    model_path: str
    """A Hugging Face-format directory."""
    version: int
    """The policy version those weights are."""
    threads: int
    """Compute threads this process may use."""
    quantization: Quantization | None = None
    """Set: the weights of every update are those of this scheme, what it covers in parts. Those at ``model_path`` are
    not, and no request asks for them."""


class WeightUpdate(ABC):
    """One weight update in progress. Every method may be repeated; a repeat changes nothing."""

    def wants(self, name: str) -> bool:
        """Whether this tensor of the manifest must be applied; False for what the engine has already, to the bit."""
        return True

    @abstractmethod
    async def apply(self, name: str, tensor: Array) -> None:
        """Stage one tensor, by its Hugging Face name. Serving is not disturbed. What is wrong with a tensor may be told
        here or at :meth:`commit`; applying it again, right, mends it."""

    @abstractmethod
    async def commit(self) -> None:
        """Make the version servable; an engine with one live version replaces it. EngineError when a tensor of the
        manifest that it :meth:`wants` is missing or of another shape; the engine then still serves what it served
        before."""

    @abstractmethod
    async def abort(self) -> None:
        """Forget what was staged."""


class InferenceEngine(Plugin, ABC):
    """One replica. States: constructed → ``start`` → serving → ``close``.

    ``submit`` and ``outputs`` are used by one consumer. ``close`` may be called at any time and twice;
    requests still running then end as ``aborted`` or without an output.
    """

    @classmethod
    def capabilities(cls, settings: Any) -> InferenceCapabilities:
        """Answered without importing the engine."""
        return InferenceCapabilities()

    @classmethod
    def check_model(cls, settings: Any, model: ModelFacts, *, origin: Callable[[str], str]) -> None:
        """As :meth:`preflight`, about the model: raise a HeadraceError when it cannot be served under these settings,
        for example with less memory than one of its sequences takes."""

    @abstractmethod
    async def start(self, context: InferenceContext) -> None:
        """Load the model and serve ``context.version``. EngineError when it cannot."""

    @abstractmethod
    async def submit(self, requests: Sequence[GenerationRequest]) -> None:
        """Accept requests, all at once and in this order. EngineError, and none accepted, when a request's version is
        not live. A prompt that leaves no room for a token in the context is answered by no token and ``length``.
        Cancelled, it has accepted none."""

    @abstractmethod
    def outputs(self) -> AsyncIterator[list[GenerationOutput]]:
        """Outputs of all requests as they appear; ends after ``close``. An engine that has failed raises
        EngineError here."""

    @abstractmethod
    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests with ``aborted`` and what they have; unknown or finished ones are ignored."""

    @abstractmethod
    async def begin_update(self, manifest: WeightManifest) -> WeightUpdate:
        """Begin to receive ``manifest.version``. A begun, uncommitted update of the same version is replaced;
        a version that is live already gives an update whose methods do nothing."""

    @abstractmethod
    async def health(self) -> EngineHealth:
        """Answers within a second while the engine lives. EngineError when it has failed: then its node ends and is
        started again, whereas what an engine raises that lives, such as of weights that are not the model's, ends the
        run."""

    @abstractmethod
    async def close(self) -> None:
        """Free everything."""


class Scoring(ABC):
    """Capability: log-probs of given tokens. With it, every version is probed on every instance before it serves."""

    @abstractmethod
    async def score(self, tokens: Array, *, version: int, temperature: float) -> Array:
        """float32 [T] for token ids [T]: entry t is the log-prob of token t after those before it, entry 0 is 0.
        EngineError when the version is not live."""


class MultiVersion(ABC):
    """Capability: several policy versions live at the same time."""

    @abstractmethod
    async def retire(self, version: int) -> None:
        """Forget a version with no request running; an unknown one is ignored."""


class KVMigration(ABC):
    """Capability: an unfinished request goes on in another engine as if it had not moved, and computes nothing again.

    The keys and values of a sequence follow from its tokens and the weights alone (DORA, arXiv 2604.26256, on KV-cache
    reuse), so every engine of the same kind that serves the version can use them.
    """

    @abstractmethod
    def fingerprint(self, version: int) -> str:
        """Equal for two engines if each can use the other's keys and values of ``version``: the same kind of engine,
        model shape, dtype, layout, and digest of the received weights. EngineError when the version is not live."""

    @abstractmethod
    async def export_request(self, request_id: str) -> RequestState | None:
        """Take an unfinished request out of this engine, which forgets it and reports no more of it. None for an
        unknown one, and for one that has ended: its last output has been reported or is on its way. Cancelled, the
        request stays. What was sampled before is in the state, whether reported or not."""

    @abstractmethod
    async def import_request(self, state: RequestState) -> None:
        """Go on with a request: the tokens that follow are those that the exporting engine would have sampled. Its
        outputs begin after ``state.reported`` tokens, spans in response coordinates. A state without keys and values
        is accepted too; they are computed again. The request may be of another version than the tokens so far: what
        follows is sampled from that version, on the keys and values that come with it.

        EngineError, and nothing is accepted, when the version is not live, when the fingerprint is not this engine's,
        or when keys, values, tokens, log-probs or spans are not of the shape or dtype that the others imply."""
