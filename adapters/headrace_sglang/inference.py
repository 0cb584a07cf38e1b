"""The ``sglang`` inference engine: SGLang's server in processes beside the node's, or one that is there already."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

from headrace.contract.inference import InferenceCapabilities, InferenceContext
from headrace.contract.setup import Setup
from headrace.errors import PluginError
from headrace_serving.engine import Backend, ServingEngine
from headrace_sglang.attaching import attached
from headrace_sglang.backend import SglangBackend
from headrace_sglang.client import Client
from headrace_sglang.launch import CPU_SETUP, OWN, RESERVED, TESTED, Server, served_as

LOCAL_HOSTS = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class SglangInferenceSettings:
    """The ``[rollout]`` table of the ``sglang`` engine."""

    slots: int = 64
    """Sequences decoded at once."""
    max_length: int | None = None
    """Prompt and response tokens of a sequence; the model's own limit when absent."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_tokens: int | None = None
    """Tokens whose keys and values there is memory for. Absent: SGLang's own share of the memory."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's ``ServerArgs``, by their names there."""
    address: str | tuple[str, ...] = ()
    """Of a server on this machine that is there already, for example ``http://127.0.0.1:30000``, or of one for each
    instance. Absent: instances start their own; else ``kv_tokens`` and ``engine`` are the server's."""

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 1 << 16:
            raise ValueError(f"slots must be 1 to {1 << 16}, got {self.slots}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {self.max_length}")
        if self.kv_tokens is not None and self.kv_tokens <= RESERVED:
            raise ValueError(f"kv_tokens must be more than {RESERVED}, got {self.kv_tokens}")
        if taken := sorted(OWN & self.engine.keys()):
            raise ValueError(f"engine must not set {', '.join(taken)}: settings of this table or the adapter do")
        if not self.addresses:
            return
        for address in self.addresses:
            parts = urlsplit(address)
            if parts.scheme not in ("http", "https") or parts.hostname not in LOCAL_HOSTS or parts.port is None:
                raise ValueError(
                    "address must be http://127.0.0.1:PORT, of a server on this machine, which weights reach through "
                    f"its memory; got {address!r}"
                )
        if self.kv_tokens is not None or self.engine:
            raise ValueError("kv_tokens and engine are for a server that is started, and address names one that is")

    @property
    def addresses(self) -> tuple[str, ...]:
        """Empty where instances start their servers."""
        return (self.address,) if isinstance(self.address, str) else self.address


class SglangInferenceEngine(ServingEngine):
    """SGLang as it is released."""

    Settings = SglangInferenceSettings
    kind = "SGLang"

    @classmethod
    def setup(cls) -> Setup:
        """For CPUs. On a GPU SGLang is installed as its own page says."""
        return CPU_SETUP

    @classmethod
    def preflight(cls, settings: Any, *, directory: str, origin: Callable[[str], str]) -> None:
        """SGLang must be there, where it is to be started. A folder of that name where the command is given looks like
        a package, without origin."""
        if settings.addresses:
            return
        spec = importlib.util.find_spec("sglang")
        if spec is None or spec.origin is None:
            raise PluginError(
                "inference_engine 'sglang' needs SGLang, which this interpreter does not have",
                fix="headrace env create sglang makes an interpreter that has it, for rollout.python; tested: SGLang "
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

    async def open_backend(self, context: InferenceContext, *, length: int) -> Backend:
        """The server is this thread's child: the event loop's, which lives as long as the node."""
        options: SglangInferenceSettings = self.settings
        expected = served_as(slots=options.slots, length=length, dtype=options.dtype)
        if options.addresses:
            return await attached(options.addresses, context, expected, length=length)
        arguments = {
            **options.engine,
            **expected,
            "model_path": context.model_path,
            "weight_version": str(context.version),
            "max_total_tokens": options.kv_tokens,
        }
        server = Server(arguments, threads=context.threads)
        backend = SglangBackend(client := Client(server.address, server.key), server, context=length)
        try:
            await server.ready(client)
        except BaseException:  # cancelled too: nobody may be left; raised again
            await backend.close()
            raise
        return backend
