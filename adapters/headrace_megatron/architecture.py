"""Which models there are, and what they are in Megatron's words.

Invariant: a model that Megatron-Core would compute otherwise than its author is refused here.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F

from headrace.errors import EngineError
from headrace_megatron.settings import MegatronTrainingSettings
from headrace_torch.model import Decoder, ModelConfig

_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
"""Megatron has no other Llama 3 scaling of frequencies; the factor is free."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """Of every layer of a mixture."""

    count: int
    chosen: int
    """By each token."""
    width: int
    """Of one expert's inner layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Architecture:
    """A Llama, Qwen2 or Qwen3 model, or with ``experts`` a Qwen3 mixture."""

    config: ModelConfig
    """With ``experts``, of the model but for these."""
    experts: Experts | None

    @classmethod
    def from_directory(cls, path: str) -> Architecture:
        """Read ``path/config.json``. EngineError when it is missing or of a model that is not supported."""
        file = Path(path) / "config.json"
        try:
            values: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            values = {}  # whose problem the next line tells
        if values.get("model_type") != "qwen3_moe":
            config, experts = ModelConfig.from_directory(path), None
        else:
            experts = _experts(values, str(file))
            width = values.get("head_dim") or values["hidden_size"] // values["num_attention_heads"]
            dense = {**values, "model_type": "qwen3", "head_dim": width}
            config = ModelConfig.from_json(dense, origin=str(file))
        _require_supported(config, str(file))
        return cls(config=config, experts=experts)

    def to_json(self) -> dict[str, Any]:
        """What tells it from others."""
        return {**self.config.to_json(), "experts": None if self.experts is None else asdict(self.experts)}

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Of its tensors, by their Hugging Face names."""
        with torch.device("meta"):
            dense = {name: tuple(p.shape) for name, p in Decoder(self.config).named_parameters()}
        return dense if self.experts is None else dict(_with_experts(dense, self.experts, self.config.hidden_size))


def _experts(values: Mapping[str, Any], origin: str) -> Experts:
    if values.get("decoder_sparse_step", 1) != 1 or values.get("mlp_only_layers"):
        raise _unsupported("a mixture some of whose layers have no experts", origin)
    if not values.get("norm_topk_prob", False):
        raise _unsupported("norm_topk_prob = false", origin)
    try:
        return Experts(
            count=int(values["num_local_experts"] if "num_local_experts" in values else values["num_experts"]),
            chosen=int(values["num_experts_per_tok"]),
            width=int(values["moe_intermediate_size"]),
        )
    except KeyError as error:
        raise EngineError(f"config.json lacks {error}", origin=origin, fix="restore the model's own file") from None


def _with_experts(
    dense: Mapping[str, tuple[int, ...]], experts: Experts, hidden: int
) -> Iterator[tuple[str, tuple[int, ...]]]:
    for name, shape in dense.items():
        before, found, rest = name.partition(".mlp.")
        if not found:
            yield name, shape
        elif rest.startswith("gate_proj"):
            yield f"{before}.mlp.gate.weight", (experts.count, hidden)
            for number in range(experts.count):
                prefix = f"{before}.mlp.experts.{number}"
                yield f"{prefix}.gate_proj.weight", (experts.width, hidden)
                yield f"{prefix}.up_proj.weight", (experts.width, hidden)
                yield f"{prefix}.down_proj.weight", (hidden, experts.width)


def _require_supported(config: ModelConfig, origin: str) -> None:
    if config.output_bias or config.mlp_bias:
        raise _unsupported("biases other than those of queries, keys and values", origin)
    scaling = config.rope_scaling
    if scaling is not None and any(getattr(scaling, name) != value for name, value in _LLAMA3.items()):
        raise _unsupported(f"a scaling of frequencies other than Llama 3's own, {_LLAMA3}", origin)


def require_layout(architecture: Architecture, settings: MegatronTrainingSettings, *, origin: str) -> None:
    """EngineError unless the model can be cut so."""
    config, experts = architecture.config, architecture.experts
    tensor, stages = settings.tensor_parallel, settings.pipeline_parallel
    for what, count, parts, key in (
        ("key-value heads", config.num_key_value_heads, tensor, "tensor_parallel"),
        ("tokens of the vocabulary", config.vocab_size, tensor, "tensor_parallel"),
        ("numbers of the inner layer", config.intermediate_size, tensor, "tensor_parallel"),
        ("layers", config.num_hidden_layers, stages, "pipeline_parallel"),
        (
            "experts",
            experts.count if experts else settings.expert_parallel,
            settings.expert_parallel,
            "expert_parallel",
        ),
    ):
        if count % parts:
            raise EngineError(
                f"{count} {what} cannot be shared equally by {key} = {parts}",
                origin=origin,
                fix=f"set {key} to a divisor of {count}",
            )
    if experts is None and settings.expert_parallel > 1:
        raise EngineError("the model has no experts to share", origin=origin, fix="set expert_parallel = 1")
    if experts is not None and tensor > 1:
        raise EngineError(
            "a mixture of experts is trained with tensor_parallel = 1 by this engine",
            origin=origin,
            fix="set tensor_parallel = 1, and data_parallel and expert_parallel instead",
        )


def transformer_options(architecture: Architecture, settings: MegatronTrainingSettings) -> dict[str, Any]:
    """Arguments of Megatron's ``TransformerConfig``. Nothing of it needs Transformer Engine or Apex."""
    config, experts = architecture.config, architecture.experts
    dtype = getattr(torch, settings.dtype)
    options: dict[str, Any] = {
        "num_layers": config.num_hidden_layers,
        "hidden_size": config.hidden_size,
        "num_attention_heads": config.num_attention_heads,
        "num_query_groups": config.num_key_value_heads,
        "kv_channels": config.head_dim,
        "ffn_hidden_size": config.intermediate_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": config.rms_norm_eps,
        "qk_layernorm": config.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": config.attention_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "tensor_model_parallel_size": settings.tensor_parallel,
        "pipeline_model_parallel_size": settings.pipeline_parallel,
        "variable_seq_lengths": settings.pipeline_parallel > 1,
        "moe_token_dispatcher_type": "alltoall",  # which variable lengths need, experts or not
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "bf16": dtype == torch.bfloat16,
        "calculate_per_token_loss": True,  # gradients stay sums: this engine divides them once
        "perform_initialization": False,  # weights are read from files
        "use_cpu_initialization": settings.device == "cpu",
        **dict.fromkeys(_FUSED, False),
    }
    if experts is not None:
        options |= {
            "num_moe_experts": experts.count,
            "moe_router_topk": experts.chosen,
            "moe_ffn_hidden_size": experts.width,
            "moe_router_load_balancing_type": "none",
            "moe_router_pre_softmax": False,
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": False,
            "expert_model_parallel_size": settings.expert_parallel,
            "expert_tensor_parallel_size": 1,
        }
    return options


_FUSED = (
    "apply_rope_fusion",
    "bias_activation_fusion",
    "bias_dropout_fusion",
    "gradient_accumulation_fusion",
    "masked_softmax_fusion",
    "persist_layer_norm",
)
"""Kernels of Transformer Engine and Apex."""


def _unsupported(what: str, origin: str) -> EngineError:
    return EngineError(
        f"not supported by headrace_megatron: {what}",
        origin=origin,
        fix="choose a Llama, Qwen2, Qwen3 or Qwen3-MoE model without it, or another engine",
    )
