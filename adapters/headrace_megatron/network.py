"""Megatron's model, filled from and published as Hugging Face's tensors.

Invariant: a network is filled whole, or not used.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace_megatron.architecture import Architecture, transformer_options
from headrace_megatron.engine import Float16Module, GPTModel, TransformerConfig, get_gpt_layer_local_spec
from headrace_megatron.layout import Layout
from headrace_megatron.names import Place, places
from headrace_torch.checkpoint import stored_tensors

_EMBEDDING, _HEAD = "model.embed_tokens.weight", "output_layer.weight"


class Network(GPTModel):  # type: ignore[misc]  # Megatron has no types
    """This rank's part of a model."""

    def setup_embeddings_and_output_layer(self) -> None:
        """As Megatron's, but that the two copies of a tied embedding are not made equal here: both are read."""
        told, self.config.init_model_with_meta_device = self.config.init_model_with_meta_device, True
        super().setup_embeddings_and_output_layer()
        self.config.init_model_with_meta_device = told


def transformer_config(architecture: Architecture, layout: Layout) -> Any:
    """Megatron's own."""
    return TransformerConfig(**transformer_options(architecture, layout.settings))


def build(architecture: Architecture, layout: Layout, config: Any) -> Network:
    """With memory for this rank's part alone, and nothing in it yet. ``config``: of :func:`transformer_config`."""
    model, scaling = architecture.config, architecture.config.rope_scaling
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=False,
        qk_layernorm=model.qk_norm,
        normalization="RMSNorm",
    )
    network = Network(
        config=config,
        transformer_layer_spec=spec,
        vocab_size=model.vocab_size,
        max_sequence_length=model.max_position_embeddings,
        pre_process=layout.first,
        post_process=layout.last,
        parallel_output=True,
        share_embeddings_and_output_weights=model.tie_word_embeddings,
        position_embedding_type="rope",
        rotary_base=model.rope_theta,
        rope_scaling=scaling is not None,
        rope_scaling_factor=1.0 if scaling is None else scaling.factor,
    )
    return network if layout.settings.device == "cpu" else network.cuda()


def in_dtype(network: Network, config: Any) -> Any:
    """What computes: with ``bf16``, Megatron's wrapper, which takes and gives float32."""
    return Float16Module(config, network) if config.bf16 else network


class Weights:
    """The tensors of a network by their Hugging Face names."""

    def __init__(self, network: Network, architecture: Architecture, layout: Layout) -> None:
        self.shapes = architecture.shapes
        self._layout = layout
        self._parameters = dict(network.named_parameters())
        self._places = places(architecture, layout.settings)
        assert self._places.keys() == self.shapes.keys()

    @torch.no_grad()
    def read(self, path: str) -> None:
        """From a Hugging Face directory, of which each rank reads its own part. EngineError as of
        :func:`stored_tensors`."""
        filled: set[str] = set()
        with stored_tensors(path, {name: torch.Size(shape) for name, shape in self.shapes.items()}) as stored:
            for name, place in self._mine():
                part = stored[name][:]
                if place.cut is not None:
                    part = part.chunk(self._layout.settings.tensor_parallel, place.cut)[self._layout.tensor_rank]
                target = place.view(self._parameters[place.parameter])
                target.copy_(part.reshape(target.shape))
                filled.add(place.parameter)
        assert filled == self._parameters.keys(), f"not in the files: {sorted(self._parameters.keys() - filled)}"

    def _mine(self) -> Iterable[tuple[str, Place]]:
        layout = self._layout
        for name, place in self._places.items():
            if place.stage == layout.stage and place.expert_rank in (None, layout.expert_rank):
                yield name, place
        if layout.last and not layout.first and "lm_head.weight" not in self._places:
            yield _EMBEDDING, Place(parameter=_HEAD, stage=layout.stage, first=layout.rank, cut=0)

    @torch.no_grad()
    def whole(self, name: str) -> Tensor | None:
        """The tensor, at rank 0; collective."""
        place, layout = self._places[name], self._layout
        count = 1 if place.cut is None else layout.settings.tensor_parallel
        owners = range(place.first, place.first + count)
        own = None
        if layout.rank in owners:
            parameter = place.view(self._parameters[place.parameter].detach())
            own = parameter.reshape(self._part_shape(name, place)).cpu().contiguous()
            if layout.rank:
                dist.send(own.view(torch.uint8), 0)
        if layout.rank:
            return None
        dtype = getattr(torch, layout.settings.dtype)
        parts = []
        for owner in owners:
            part = own if owner == 0 and own is not None else torch.empty(self._part_shape(name, place), dtype=dtype)
            if owner:
                dist.recv(part.view(torch.uint8), owner)
            parts.append(part)
        return parts[0] if place.cut is None else torch.cat(parts, place.cut)

    def _part_shape(self, name: str, place: Place) -> tuple[int, ...]:
        shape = list(self.shapes[name])
        if place.cut is not None:
            shape[place.cut] //= self._layout.settings.tensor_parallel
        return tuple(shape)
