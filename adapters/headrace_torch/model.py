"""The decoder model shared by training and inference.

A model works on a flat sequence of tokens, [T, d]: which tokens see which others is the business of
the *attention* object handed to :meth:`Decoder.forward` (packed causal attention in training, a
key-value cache in decoding). Invariant: parameter names and arithmetic are Hugging Face's.
"""

from __future__ import annotations

import math
from typing import Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from headrace_torch.low_bit.straight_through import straight_through
from headrace_torch.low_bit.weight import LowBitWeight
from headrace_torch.model_config import Llama3RopeScaling, ModelConfig
from headrace_torch.products import linear

__all__ = ["Attention", "Decoder", "DecoderLayer", "Llama3RopeScaling", "ModelConfig"]


class Attention(Protocol):
    """Decides which keys a query sees."""

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q``: [T, H, D]; ``k``, ``v``: [T, KV, D], rotated already, H a multiple of KV. Returns [T, H, D]."""


class Linear(nn.Linear):
    """Uninitialised at construction: weights are loaded, or drawn by ``create_weights`` from its own seed."""

    low_bit: LowBitWeight | None = None
    """What it computes with in place of its weight, which still gets the gradient."""

    def reset_parameters(self) -> None:
        """Nothing: the global random state stays untouched."""

    def forward(self, input: Tensor) -> Tensor:
        """See :mod:`headrace_torch.products` and :mod:`headrace_torch.low_bit`."""
        if self.low_bit is None:
            return linear(input, self.weight, self.bias)
        product = straight_through(input, self.weight, self.low_bit)
        return product if self.bias is None else product + self.bias


class Embedding(nn.Embedding):
    """Uninitialised at construction, as :class:`Linear`."""

    def reset_parameters(self) -> None:
        """Nothing: the global random state stays untouched."""


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last axis (Zhang & Sennrich 2019, eq. 4)."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        if x.dtype == torch.float32:
            return F.rms_norm(x, self.weight.shape, self.weight, self.eps)
        # Narrow types are scaled after rounding, as transformers and vLLM do.
        return F.rms_norm(x.float(), self.weight.shape, None, self.eps).to(x.dtype) * self.weight


class Rotary:
    """Rotary position embedding (Su et al. 2021, section 3.4.2, half-split layout)."""

    def __init__(self, config: ModelConfig) -> None:
        exponents = torch.arange(0, config.head_dim, 2, dtype=torch.float32, device="cpu") / config.head_dim
        frequencies = 1.0 / (config.rope_theta**exponents)
        if config.rope_scaling is not None:
            frequencies = _llama3_frequencies(frequencies, config.rope_scaling)
        self.frequencies = frequencies
        """float32 [D / 2], radians per position; not a buffer, because a model cast to bfloat16 keeps it exact."""

    def angles(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and signed sines, [T, 1, D] each, for int64 ``positions`` [T]; see :func:`rotate`."""
        if self.frequencies.device != positions.device:
            self.frequencies = self.frequencies.to(positions.device)
        radians = positions.float().unsqueeze(1) * self.frequencies
        cos, sin = radians.cos(), radians.sin()
        cos, sin = torch.cat((cos, cos), dim=1), torch.cat((-sin, sin), dim=1)
        return cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the pairs (x[i], x[i + D/2]) of [T, H, D] by their position's angles; ``sin`` is negative in its
    first half, which saves negating half of ``x``."""
    return x * cos + x.roll(x.shape[-1] // 2, -1) * sin


def _llama3_frequencies(frequencies: Tensor, scaling: Llama3RopeScaling) -> Tensor:
    """Wavelengths beyond original / low are divided by ``factor``, those under original / high kept, and the
    band between interpolated (Llama 3.1 reference implementation, ``apply_scaling``)."""
    rotations = scaling.original_max_position_embeddings * frequencies / (2 * math.pi)
    smooth = (rotations - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    smooth = smooth.clamp(0.0, 1.0)
    return (1 - smooth) * frequencies / scaling.factor + smooth * frequencies


class SelfAttention(nn.Module):
    """Projections around an :class:`Attention`; grouped key-value heads, optional per-head norm."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, width = config.hidden_size, config.head_dim
        self.heads, self.kv_heads, self.width = config.num_attention_heads, config.num_key_value_heads, width
        self.q_proj = Linear(d, self.heads * width, bias=config.attention_bias)
        self.k_proj = Linear(d, self.kv_heads * width, bias=config.attention_bias)
        self.v_proj = Linear(d, self.kv_heads * width, bias=config.attention_bias)
        self.o_proj = Linear(self.heads * width, d, bias=config.output_bias)
        self.q_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else None
        self.k_norm = RMSNorm(width, config.rms_norm_eps) if config.qk_norm else None

    def forward(self, x: Tensor, layer: int, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """``x``: [T, d]; ``cos``, ``sin``: [T, 1, D]. Returns [T, d]."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.width))
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.width))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.width))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        mixed = attention(layer, rotate(q, cos, sin), rotate(k, cos, sin), v)
        return cast(Tensor, self.o_proj(mixed.flatten(1)))


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020, "GLU variants", SwiGLU)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        d, inner = config.hidden_size, config.intermediate_size
        self.gate_proj = Linear(d, inner, bias=config.mlp_bias)
        self.up_proj = Linear(d, inner, bias=config.mlp_bias)
        self.down_proj = Linear(inner, d, bias=config.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x)))


class DecoderLayer(nn.Module):
    """Pre-norm attention and gated MLP, each with a residual."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.self_attn = SelfAttention(config)
        self.mlp = GatedMLP(config)
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.recompute = False
        """Whether only its input is kept for the backward pass, which then computes the layer again."""

    def forward(self, x: Tensor, layer: int, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """Arguments as of :class:`SelfAttention`."""
        arguments = (x, layer, cos, sin, attention)
        if not self.recompute or not torch.is_grad_enabled():
            return self._compute(*arguments)
        return cast(Tensor, checkpoint(self._compute, *arguments, use_reentrant=False, preserve_rng_state=False))

    def _compute(self, x: Tensor, layer: int, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), layer, cos, sin, attention)
        return x + cast(Tensor, self.mlp(self.post_attention_layernorm(x)))


class Backbone(nn.Module):
    """Embedding, layers and final norm; the ``model.`` prefix of Hugging Face names."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config) for _ in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)


class Decoder(nn.Module):
    """A causal language model. ``lm_head`` exists only when it is not tied to the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        """Parameters are uninitialised: see :mod:`headrace_torch.checkpoint`."""
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.rotary = Rotary(config)
        if not config.tie_word_embeddings:
            self.lm_head = Linear(config.hidden_size, config.vocab_size, bias=False)

    @property
    def output_weight(self) -> Tensor:
        """[V, d], of the output head."""
        return self.model.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def forward(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, d] after the final norm.

        ``tokens``, ``positions``: int64 [T], any number of sequences one after another, each with its own
        positions; ``attention`` keeps them apart.
        """
        x = self.model.embed_tokens(tokens)
        cos, sin = self.rotary.angles(positions, x.dtype)
        for index, layer in enumerate(self.model.layers):
            x = layer(x, index, cos, sin, attention)
        return cast(Tensor, self.model.norm(x))

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, V] for hidden states [T, d]."""
        if self.config.tie_word_embeddings:
            return linear(hidden, self.output_weight).float()
        return cast(Tensor, self.lm_head(hidden)).float()
