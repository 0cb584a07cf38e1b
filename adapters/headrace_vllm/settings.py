"""The ``[rollout]`` table of the ``vllm`` engine."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

OWN = frozenset(
    {
        "disable_log_stats",
        "dtype",
        "enforce_eager",
        "generation_config",
        "kv_cache_memory_bytes",
        "logits_processors",
        "logprobs_mode",
        "max_model_len",
        "max_num_seqs",
        "model",
        "skip_tokenizer_init",
        "weight_transfer_config",
        "worker_extension_cls",
    }
)
"""Arguments of vLLM that the adapter gives itself."""
_ADDRESS = re.compile(r"https?://[^/\s]+/?")


@dataclass(frozen=True, slots=True, kw_only=True)
class VllmInferenceSettings:
    """The ``[rollout]`` table of the ``vllm`` engine."""

    slots: int = 64
    """Sequences decoded at once."""
    max_length: int | None = None
    """Prompt and response tokens of a sequence; the model's own limit when absent."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    kv_bytes: int | None = None
    """Memory for keys and values. Absent: 1 GiB on a CPU, vLLM's own share of the memory of a GPU."""
    eager: bool | None = None
    """Compute without compiling. Absent: on a CPU, where compiling takes minutes."""
    engine: Mapping[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``AsyncEngineArgs``, by their names there."""
    address: str | tuple[str, ...] = ()
    """Of a running server, such as ``"http://127.0.0.1:8000"``, or of one for each instance. Absent: instances start
    vLLM."""

    def __post_init__(self) -> None:
        if not 1 <= self.slots <= 1 << 16:
            raise ValueError(f"slots must be 1 to {1 << 16}, got {self.slots}")
        if self.max_length is not None and self.max_length < 2:
            raise ValueError(f"max_length must be at least 2, got {self.max_length}")
        if self.kv_bytes is not None and self.kv_bytes < 1:
            raise ValueError(f"kv_bytes must be at least 1, got {self.kv_bytes}")
        if taken := sorted(OWN & self.engine.keys()):
            raise ValueError(f"engine must not set {', '.join(taken)}: settings of this table or the adapter do")
        if not self.addresses:
            return
        if wrong := [address for address in self.addresses if not _ADDRESS.fullmatch(address)]:
            raise ValueError(f"address must be like http://127.0.0.1:8000, got {', '.join(map(repr, wrong))}")
        if len(set(self.addresses)) < len(self.addresses):
            raise ValueError(f"address names a server twice: {', '.join(self.addresses)}")
        given = [name for name in ("kv_bytes", "eager") if getattr(self, name) is not None]
        if given := given + ["engine"] * bool(self.engine):
            raise ValueError(
                f"{', '.join(given)} cannot be set with address: they are the running server's, of its command line"
            )

    @property
    def addresses(self) -> tuple[str, ...]:
        """Without a last slash; empty where instances start vLLM."""
        given = (self.address,) if isinstance(self.address, str) else self.address
        return tuple(address.rstrip("/") for address in given)
