"""A tiny Llama in Hugging Face's format, written with numpy alone: any interpreter can make one for its engine."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from headrace.contract import Array, Plugin, TinyModels
from headrace.testing.tensors import write_tensors

LAYERS, HEADS, KV_HEADS, HEAD, INNER, VOCABULARY = 2, 4, 2, 32, 128, 256
"""Heads of 32 numbers are the smallest that vLLM computes on a CPU; two of them can be shared out to two ranks."""
LENGTH = 256
"""Tokens of its longest sequence, where the engine is not told of longer ones."""


def write_tiny_model(engine: type[Plugin], path: str, *, length: int | None) -> None:
    """Into the directory ``path``: the engine's own, if it knows no other. ``length``: tokens of the longest sequence
    that the engine is set to; None: any."""
    if issubclass(engine, TinyModels):
        engine.write_tiny_model(path)
        return
    hidden = HEADS * HEAD
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD,
        "max_position_embeddings": length or LENGTH,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "torch_dtype": "float32",
    }
    (Path(path) / "config.json").write_text(json.dumps(config))
    write_tensors(Path(path) / "model.safetensors", _tensors(hidden))


def _tensors(hidden: int) -> dict[str, Array]:
    """Random, so that no two tokens are alike likely."""
    generator = np.random.default_rng(0)

    def matrix(rows: int, columns: int) -> Array:
        values: Array = generator.standard_normal((rows, columns)) * columns**-0.5
        return values.astype(np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, hidden)}
    for layer in range(LAYERS):
        own = {
            "self_attn.q_proj": (HEADS * HEAD, hidden),
            "self_attn.k_proj": (KV_HEADS * HEAD, hidden),
            "self_attn.v_proj": (KV_HEADS * HEAD, hidden),
            "self_attn.o_proj": (hidden, HEADS * HEAD),
            "mlp.gate_proj": (INNER, hidden),
            "mlp.up_proj": (INNER, hidden),
            "mlp.down_proj": (hidden, INNER),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": matrix(*shape) for name, shape in own.items()}
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"model.layers.{layer}.{name}.weight"] = np.ones(hidden, np.float32)
    tensors["model.norm.weight"] = np.ones(hidden, np.float32)
    tensors["lm_head.weight"] = matrix(VOCABULARY, hidden)
    return tensors
