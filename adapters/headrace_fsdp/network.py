"""The model in parts: FSDP2 around a decoder, one unit a layer, and one of what is left.

Invariant: all parameters are used inside :meth:`Scorer.forward`, where FSDP has them whole.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor

from headrace.contract.training import ForwardOutput
from headrace_fsdp.settings import FsdpTrainingSettings
from headrace_torch.checkpoint import stored_tensors
from headrace_torch.model import Decoder, DecoderLayer, ModelConfig
from headrace_torch.trainer.packing import Plan
from headrace_torch.trainer.parameters import Network, ValueHead
from headrace_torch.trainer.scoring import score_plan


class Scorer(nn.Module):
    """A network whose forward pass is :func:`score_plan`."""

    def __init__(self, model: Decoder, critic: ValueHead | None) -> None:
        super().__init__()
        self.model, self.critic = model, critic

    @property
    def network(self) -> Network:
        """Its parameters are :class:`DTensor` s, each rank's part of them."""
        return Network(self.model, self.critic)

    def forward(
        self, plan: Plan, temperature: float, outputs: Collection[ForwardOutput]
    ) -> Mapping[ForwardOutput, Tensor]:
        """See :func:`score_plan`."""
        found = score_plan(self.network, plan, temperature=temperature, outputs=outputs)
        return {name: score.clone() for name, score in found.items()}  # views would lose FSDP's hooks

    def end_pass(self) -> None:
        """After a forward pass that no backward pass follows: free what is whole, and what FSDP has noted."""
        assert isinstance(self, FSDPModule)
        # Where there is only reshard, the notes are a few bytes a layer and pass.
        getattr(self, "reset_iter_state", self.reshard)()


def build_scorer(config: ModelConfig, settings: FsdpTrainingSettings, mesh: DeviceMesh, *, values: bool) -> Scorer:
    """With memory for each rank's part alone, and nothing in it yet."""
    with torch.device("meta"):
        model = Decoder(config)
        critic = ValueHead(config.hidden_size) if values else None
    scorer = Scorer(model, critic)
    offload = CPUOffloadPolicy() if settings.cpu_offload else OffloadPolicy()
    narrow = None if settings.dtype == "float32" else getattr(torch, settings.dtype)
    precision = MixedPrecisionPolicy(param_dtype=narrow, reduce_dtype=torch.float32)
    for layer in model.model.layers:
        assert isinstance(layer, DecoderLayer)
        layer.recompute = settings.activation_checkpointing
        fully_shard(layer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    if critic is not None:  # it stays float32 whatever the model is
        fully_shard(critic, mesh=mesh, offload_policy=offload)
    fully_shard(scorer, mesh=mesh, mp_policy=precision, offload_policy=offload)
    for module in scorer.modules():
        if isinstance(module, FSDPModule):
            # Sums over ranks, where FSDP has means; gloo has no operation that multiplies before it adds.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    return scorer.to_empty(device="cpu" if settings.cpu_offload else settings.device)


@torch.no_grad()
def read_stored(scorer: Scorer, path: str, *, rank: int) -> None:
    """Fill a scorer from a Hugging Face directory, of which each rank reads its own part. A critic is 0.
    EngineError as of :func:`stored_tensors`."""
    parameters = dict(scorer.model.named_parameters())
    with stored_tensors(path, {name: p.shape for name, p in parameters.items()}) as stored:
        for name, parameter in parameters.items():
            part = local(parameter)
            start = rank * -(-len(parameter) // cast(DTensor, parameter).device_mesh.size())
            if part.numel():
                part.copy_(stored[name][start : start + len(part)])
    if scorer.critic is not None:
        for parameter in scorer.critic.parameters():
            local(parameter).zero_()


@torch.no_grad()
def copy_parts(target: Mapping[str, Tensor], source: Mapping[str, Tensor]) -> None:
    """Each rank's part of the ``target`` of the same name."""
    for name, parameter in target.items():
        local(parameter).copy_(local(source[name]))


def local(tensor: Tensor) -> Tensor:
    """This rank's part, the same memory; empty where there are more ranks than rows."""
    part: Tensor = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return part.detach()
