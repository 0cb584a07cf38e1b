"""What SGLang loads into each of its processes, by its own entry-point group ``sglang.srt.plugins``.

It adds a sampler by name (:mod:`headrace_sglang.sampling`), gives it the seeds of requests, and has nothing stop them
but their own stop tokens; a server that is not started with that name is left as it is.
"""

from __future__ import annotations

from typing import Any

from headrace_sglang.names import SAMPLING_BACKEND

_BATCH = "sglang.srt.sampling.sampling_batch_info.SamplingBatchInfo.from_schedule_batch"
_REQUEST = "sglang.srt.managers.schedule_batch.Req.__init__"
_CPU_ARGUMENTS = "sglang.srt.arg_groups.platform_hook.handle_cpu_backends"


def register() -> None:
    """Called by SGLang."""
    from sglang.srt.layers.sampler import register_sampler_backend
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    from headrace_sglang.sampling import SeededSampler

    register_sampler_backend(SAMPLING_BACKEND, SeededSampler)
    HookRegistry.register(_BATCH, with_seeds, HookType.AFTER)
    HookRegistry.register(_REQUEST, without_end_of_model, HookType.AFTER)
    HookRegistry.register(_CPU_ARGUMENTS, with_sampler, HookType.AFTER)


def with_seeds(info: Any, _: type[Any], batch: Any, *__: Any, **___: Any) -> None:
    """SGLang reads seeds for its deterministic kernels alone; where batches merge and shrink it takes them along
    whatever they are for."""
    import torch

    if _is_ours():
        seeds = [request.sampling_params.sampling_seed or 0 for request in batch.reqs]
        info.sampling_seed = torch.tensor(seeds, dtype=torch.int64, device=batch.device)


def without_end_of_model(_: None, request: Any, *__: Any, **___: Any) -> None:
    """Where a request has stop tokens, SGLang stops it at those of the model's files as well."""
    if _is_ours():
        request.eos_token_ids = None


def with_sampler(_: None, arguments: Any) -> None:
    """On a CPU, SGLang takes its own sampler whatever was asked for."""
    from sglang.srt.arg_groups.overrides import declare_resolution

    if arguments.sampling_backend == SAMPLING_BACKEND:
        declare_resolution(arguments, __name__, sampling_backend=SAMPLING_BACKEND)


def _is_ours() -> bool:
    from sglang.srt.runtime_context import get_exec

    return bool(get_exec().kernel.sampling_backend == SAMPLING_BACKEND)
