"""Where the tensors of a Hugging Face model are in Megatron's.

Megatron keeps queries, keys and values in one matrix, head group by head group, and gate and up projection in another.
Each Hugging Face tensor is a view of a part of one of its parameters, cut over tensor-parallel ranks along one
dimension or not at all; so reading fills views, and publishing joins them. Invariant: no number is computed, only
moved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from headrace_megatron.architecture import Architecture
from headrace_megatron.settings import MegatronTrainingSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Of a Hugging Face tensor."""

    parameter: str
    """Of Megatron's model at the ranks that have it."""
    first: int
    """Lowest rank that has a part of it. The others of its tensor-parallel group follow."""
    stage: int
    expert_rank: int | None = None
    """For an expert's: number of the ranks that have it, in their expert-parallel group; None: all do."""
    cut: int | None = None
    """Dimension that is shared by tensor-parallel ranks."""
    view: Callable[[Tensor], Tensor] = lambda parameter: parameter
    """Its part of the parameter, in the same memory; with its first dimension in two, where that is not contiguous."""


def places(architecture: Architecture, settings: MegatronTrainingSettings) -> dict[str, Place]:
    """By Hugging Face name."""
    return dict(_all(architecture, settings))


def _all(architecture: Architecture, settings: MegatronTrainingSettings) -> Iterator[tuple[str, Place]]:
    config, stages = architecture.config, settings.pipeline_parallel
    per_stage = config.num_hidden_layers // stages
    ranks = settings.tensor_parallel * settings.data_parallel
    last = partial(Place, stage=stages - 1, first=(stages - 1) * ranks)
    yield "model.embed_tokens.weight", Place(parameter="embedding.word_embeddings.weight", stage=0, first=0, cut=0)
    for number in range(config.num_hidden_layers):
        stage, layer = divmod(number, per_stage)
        for name, place in _layer(architecture, settings, stage, f"decoder.layers.{layer}", stage * ranks):
            yield f"model.layers.{number}.{name}", place
    yield "model.norm.weight", last(parameter="decoder.final_layernorm.weight")
    if not config.tie_word_embeddings:
        yield "lm_head.weight", last(parameter="output_layer.weight", cut=0)


def _layer(
    architecture: Architecture, settings: MegatronTrainingSettings, stage: int, prefix: str, first: int
) -> Iterator[tuple[str, Place]]:
    config, experts = architecture.config, architecture.experts
    here = partial(Place, stage=stage, first=first)
    attention = f"{prefix}.self_attention"
    heads = config.num_attention_heads // config.num_key_value_heads
    for name, start, count in (("q", 0, heads), ("k", heads, 1), ("v", heads + 1, 1)):
        view = _of_groups(config.head_dim, heads, start, count)
        for kind in ("weight", "bias") if config.attention_bias else ("weight",):
            fused = here(parameter=f"{attention}.linear_qkv.{kind}", cut=0, view=view)
            yield f"self_attn.{name}_proj.{kind}", fused
    yield "self_attn.o_proj.weight", here(parameter=f"{attention}.linear_proj.weight", cut=1)
    if config.qk_norm:
        for name in ("q", "k"):
            yield f"self_attn.{name}_norm.weight", here(parameter=f"{attention}.{name}_layernorm.weight")
    yield "input_layernorm.weight", here(parameter=f"{prefix}.input_layernorm.weight")
    yield "post_attention_layernorm.weight", here(parameter=f"{prefix}.pre_mlp_layernorm.weight")
    if experts is None:
        yield from _gated("mlp", here(parameter=f"{prefix}.mlp", cut=0))
        return
    yield "mlp.gate.weight", here(parameter=f"{prefix}.mlp.router.weight")
    each = experts.count // settings.expert_parallel
    for number in range(experts.count):
        rank, local = divmod(number, each)
        own = f"{prefix}.mlp.experts.local_experts.{local}"
        whole = Place(parameter=own, cut=None, stage=stage, first=first + rank, expert_rank=rank)
        yield from _gated(f"mlp.experts.{number}", whole)


def _gated(name: str, place: Place) -> Iterator[tuple[str, Place]]:
    """``place``: with the prefix of the parameters."""
    for half, part in enumerate(("gate_proj", "up_proj")):
        yield f"{name}.{part}.weight", _within(place, "linear_fc1.weight", place.cut, _half(half))
    down = None if place.cut is None else 1
    yield f"{name}.down_proj.weight", _within(place, "linear_fc2.weight", down, lambda parameter: parameter)


def _within(place: Place, name: str, cut: int | None, view: Callable[[Tensor], Tensor]) -> Place:
    return Place(
        parameter=f"{place.parameter}.{name}",
        stage=place.stage,
        first=place.first,
        expert_rank=place.expert_rank,
        cut=cut,
        view=view,
    )


def _half(number: int) -> Callable[[Tensor], Tensor]:
    return lambda parameter: parameter.chunk(2)[number]


def _of_groups(width: int, heads: int, start: int, count: int) -> Callable[[Tensor], Tensor]:
    """``count`` heads of each group, which has ``heads`` of queries, one of keys and one of values."""
    group = (heads + 2) * width
    return lambda parameter: parameter.view(-1, group, *parameter.shape[1:])[:, start * width : (start + count) * width]
