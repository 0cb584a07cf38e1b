"""One loaded model being served: what the plugin class holds between ``start`` and ``close``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from headrace.contract.generation import GenerationOutput
from headrace.contract.quantization import Quantization
from headrace.contract.weights import WeightManifest
from headrace.errors import EngineError
from headrace_torch.checkpoint import load_model
from headrace_torch.decode.adapters import SharedBase
from headrace_torch.decode.scheduler import Scheduler
from headrace_torch.decode.staging import StagedWeights
from headrace_torch.decode.worker import DecodeWorker
from headrace_torch.model import ModelConfig

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOptions:
    """Engine settings and start context in one."""

    name: str
    model_path: str
    version: int
    threads: int
    slots: int
    max_length: int | None
    kv_tokens: int | None
    dtype: str
    device: str
    quantization: Quantization | None


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeSession:
    """A running worker and what is needed to stage weights for it."""

    config: ModelConfig
    max_length: int
    dtype: torch.dtype
    device: str
    quantization: Quantization | None
    worker: DecodeWorker

    def stage(self, manifest: WeightManifest, base: SharedBase | None) -> StagedWeights:
        """Room for the weights of another version. ``base``: what may be of use for it."""
        return StagedWeights(
            self.config, manifest, dtype=self.dtype, device=self.device, scheme=self.quantization, base=base
        )


def open_session(
    options: SessionOptions,
    *,
    deliver: Callable[[list[GenerationOutput]], None],
    closed: Callable[[Exception | None], None],
) -> DecodeSession:
    """Load the model and start its decode thread. EngineError when the model or the device is unusable."""
    config = ModelConfig.from_directory(options.model_path)
    max_length = options.max_length or config.max_position_embeddings
    if max_length > config.max_position_embeddings:
        raise EngineError(
            f"max_length {max_length} exceeds the model's {config.max_position_embeddings} positions",
            origin=f"{options.name}, {options.model_path}",
            fix=f"set max_length to at most {config.max_position_embeddings}, or leave it out",
        )
    if options.kv_tokens is not None and options.kv_tokens < max_length:
        raise EngineError(
            f"kv_tokens {options.kv_tokens} is memory for less than one sequence of max_length {max_length}",
            origin=options.name,
            fix=f"set kv_tokens to at least {max_length}, or leave it out",
        )
    if options.device == "cuda" and not torch.cuda.is_available():
        raise EngineError(
            "device 'cuda' was asked for and torch sees none", origin=options.name, fix='set device = "cpu"'
        )
    dtype = _DTYPES[options.dtype]
    model = load_model(options.model_path, dtype=dtype, device=options.device).requires_grad_(False)
    scheduler = Scheduler(slots=options.slots, max_length=max_length, kv_tokens=options.kv_tokens)
    scheduler.install(options.version, model)
    worker = DecodeWorker(scheduler, name=options.name, threads=options.threads, deliver=deliver, closed=closed)
    worker.start()
    return DecodeSession(
        config=config,
        max_length=max_length,
        dtype=dtype,
        device=options.device,
        quantization=options.quantization,
        worker=worker,
    )
