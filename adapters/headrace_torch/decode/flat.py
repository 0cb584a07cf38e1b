"""A :class:`~headrace_torch.model.Decoder` made flat for decoding.

With a few rows per step, calls cost more than arithmetic: query, key and value are one product here, gate and up
another, rotary angles are looked up, and no module is called. Invariant: the same function of the same weights, to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace_torch.low_bit.kernels import Product
from headrace_torch.low_bit.weight import LowBitWeight
from headrace_torch.model import Attention, Decoder, DecoderLayer, Linear, RMSNorm, rotate
from headrace_torch.products import factor, linear


class FlatDecoder:
    """Takes over the weights of ``model``, which is not used any more. ``max_length``: positions there are."""

    def __init__(self, model: Decoder, *, max_length: int) -> None:
        self.config = model.config
        self._embedding = model.model.embed_tokens.weight
        self._head = _by(self._embedding, None) if model.config.tie_word_embeddings else _product(model.lm_head)
        self._layers = [_Layer.of(cast(DecoderLayer, layer)) for layer in model.model.layers]
        self._norm: RMSNorm = model.model.norm
        positions = torch.arange(max_length, device=self._embedding.device)
        self._cos, self._sin = model.rotary.angles(positions, self._embedding.dtype)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, d] after the final norm; see :meth:`Decoder.forward`."""
        x = F.embedding(tokens, self._embedding)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        for index, layer in enumerate(self._layers):
            x = layer(x, index, cos, sin, attention)
        return self._norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, V] for hidden states [T, d]."""
        return self._head(hidden).float()

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self._embedding.device


@dataclass(frozen=True, slots=True)
class _Layer:
    heads: int
    kv_heads: int
    width: int
    before: RMSNorm
    qkv: Product
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Product
    between: RMSNorm
    gate_up: Product
    down: Product

    @classmethod
    def of(cls, layer: DecoderLayer) -> _Layer:
        mixing, mlp = layer.self_attn, layer.mlp
        return cls(
            heads=mixing.heads,
            kv_heads=mixing.kv_heads,
            width=mixing.width,
            before=layer.input_layernorm,
            qkv=_product(mixing.q_proj, mixing.k_proj, mixing.v_proj),
            q_norm=mixing.q_norm,
            k_norm=mixing.k_norm,
            o=_product(mixing.o_proj),
            between=layer.post_attention_layernorm,
            gate_up=_product(mlp.gate_proj, mlp.up_proj),
            down=_product(mlp.down_proj),
        )

    def __call__(self, x: Tensor, index: int, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """``x``: [T, d]; ``cos``, ``sin``: [T, 1, D]. Returns [T, d]."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = self.qkv(self.before.forward(x)).view(-1, heads + 2 * kv_heads, self.width)
        mixed = attention(index, *self._rotated(qkv, cos, sin), qkv.narrow(1, heads + kv_heads, kv_heads))
        x = x + self.o(mixed.flatten(1))
        gate, up = self.gate_up(self.between.forward(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up)

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys: together, unless each has a norm of its own."""
        heads, kv_heads = self.heads, self.kv_heads
        if self.q_norm is None or self.k_norm is None:
            both = rotate(qkv.narrow(1, 0, heads + kv_heads), cos, sin)
            return both.narrow(1, 0, heads), both.narrow(1, heads, kv_heads)
        q, k = self.q_norm.forward(qkv.narrow(1, 0, heads)), self.k_norm.forward(qkv.narrow(1, heads, kv_heads))
        return rotate(q, cos, sin), rotate(k, cos, sin)


def _product(*layers: Linear) -> Product:
    """What all of them give, side by side: one product, unless only some are low-bit."""
    low = [layer.low_bit for layer in layers if layer.low_bit is not None]
    if low and len(low) < len(layers):
        apart = [_product(layer) for layer in layers]
        return lambda x: torch.cat([product(x) for product in apart], -1)
    bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
    if not low:
        return _by(layers[0].weight if len(layers) == 1 else torch.cat([layer.weight for layer in layers]), bias)
    product = LowBitWeight.joined(low).product
    return product if bias is None else lambda x: product(x) + bias


def _by(weight: Tensor, bias: Tensor | None) -> Product:
    return partial(linear, weight=factor(weight), bias=bias)
