"""What runs inside vLLM's own processes: takes new weights out of memory that the adapter shares with them.

vLLM imports this module by the name of its worker extension, before it looks for the weight-transfer backend that is
registered here. Weights are loaded by vLLM's own session (start, update, finish), which fuses, shards and, where layers
are quantised or packed, packs them anew; nothing of vLLM is patched.
"""

from __future__ import annotations

import json
import mmap
import multiprocessing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer import WeightTransferEngine, WeightTransferEngineFactory
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.platforms import current_platform

from headrace.process import die_with_parent
from headrace_vllm.names import BACKEND


class WorkerExtension:
    """Named in vLLM's arguments for this module's sake, and for what the adapter asks the workers of a server."""

    def headrace_read(self, path: str) -> list[int]:
        """The bytes of a file: who can read this one can take weights out of memory that the adapter shares."""
        return list(Path(path).read_bytes())

    def headrace_model(self) -> Any:
        """The model's configuration."""
        return json.loads(self.model_config.hf_config.to_json_string(use_diff=False))  # type: ignore[attr-defined]  # a worker's


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]  # types are checked where vLLM is not installed
    """Nothing has to be agreed on."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]  # see above
    """Where the tensors of a version lie."""

    path: str
    """Of a file that every process of this machine can map."""
    nbytes: int
    tensors: list[Any]
    """Name, dtype, shape and first byte of each."""


class MappedTransfer(WeightTransferEngine):  # type: ignore[misc]  # see above
    """One update is one :class:`UpdateInfo`: all tensors of a version."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def __init__(self, *arguments: Any, **named: Any) -> None:
        """Made by every worker of vLLM when it starts; those end with the process that started them."""
        super().__init__(*arguments, **named)
        parent = multiprocessing.parent_process()
        if parent is not None and parent.pid is not None:
            die_with_parent(parent.pid)
        if current_platform.is_cpu():
            # A process must ask for matrix tiles before it uses them. vLLM's attention does not; in bfloat16 it dies of
            # an illegal instruction unless something else of torch has asked by chance.
            torch.cpu._init_amx()

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Nothing to connect."""

    def start_weight_update(self) -> None:
        """Layers await the tensors of a checkpoint."""
        if current_platform.is_cpu():
            _forget_packed_experts(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Load tensors by their Hugging Face names."""
        with open(update_info.path, "rb") as file:
            memory = mmap.mmap(file.fileno(), update_info.nbytes, access=mmap.ACCESS_COPY)
        self.model.load_weights((name, _tensor(memory, *place)) for name, *place in update_info.tensors)

    def finish_weight_update(self) -> None:
        """Layers that are not plain copies of tensors are computed from them."""
        finalize_layerwise_reload(self.model, self.model_config)
        if current_platform.is_cpu():
            _pack_tied_layers(self.model)

    def shutdown(self) -> None:
        """Nothing to disconnect."""


def _forget_packed_experts(model: torch.nn.Module) -> None:
    """On a CPU, experts are packed once they are loaded. vLLM 0.32 leaves that out when they are loaded again, and then
    reads new weights, unpacked, as packed ones; a layer without a kernel is treated as one that is loaded first."""
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if method is not None and getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def _pack_tied_layers(model: torch.nn.Module) -> None:
    """On a CPU, an output head computes with a packed copy of its weights. One that is tied to the embedding has no
    tensor of its own, and so vLLM 0.32 leaves it with the copy of the old ones."""
    seen: set[int] = set()
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        weight = layer._parameters.get("weight")
        if weight is None or method is None:
            continue
        if id(weight) in seen:
            method.process_weights_after_loading(layer)
        seen.add(id(weight))


def _tensor(memory: mmap.mmap, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    kind = getattr(torch, dtype)
    count = torch.Size(shape).numel()
    return torch.frombuffer(memory, dtype=kind, count=count, offset=start).view(shape)


WeightTransferEngineFactory.register_engine(BACKEND, MappedTransfer)
