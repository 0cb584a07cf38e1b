"""A :class:`~headrace_torch.model.Decoder` made flat for decoding.

With a few rows per step, calls cost more than arithmetic: query, key and value are one product here, gate and up
another, rotary angles are looked up, and no module is called. Invariant: the same function of the same weights, to
rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace_torch.model import Attention, Decoder, DecoderLayer, Linear, RMSNorm, rotate
from headrace_torch.products import factor, linear


class FlatDecoder:
    """Takes over the weights of ``model``, which is not used any more. ``max_length``: positions there are."""

    def __init__(self, model: Decoder, *, max_length: int) -> None:
        self.config = model.config
        self.output_weight = factor(model.output_weight)
        """[V, d]."""
        self._embedding = model.model.embed_tokens.weight
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
        return linear(hidden, self.output_weight).float()


@dataclass(frozen=True, slots=True)
class _Layer:
    heads: int
    kv_heads: int
    width: int
    before: RMSNorm
    qkv: Tensor
    qkv_bias: Tensor | None
    q_norm: RMSNorm | None
    k_norm: RMSNorm | None
    o: Tensor
    o_bias: Tensor | None
    between: RMSNorm
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Tensor
    down_bias: Tensor | None

    @classmethod
    def of(cls, layer: DecoderLayer) -> _Layer:
        mixing, mlp = layer.self_attn, layer.mlp
        qkv, qkv_bias = _joined(mixing.q_proj, mixing.k_proj, mixing.v_proj)
        gate_up, gate_up_bias = _joined(mlp.gate_proj, mlp.up_proj)
        return cls(
            heads=mixing.heads,
            kv_heads=mixing.kv_heads,
            width=mixing.width,
            before=layer.input_layernorm,
            qkv=factor(qkv),
            qkv_bias=qkv_bias,
            q_norm=mixing.q_norm,
            k_norm=mixing.k_norm,
            o=factor(mixing.o_proj.weight),
            o_bias=mixing.o_proj.bias,
            between=layer.post_attention_layernorm,
            gate_up=factor(gate_up),
            gate_up_bias=gate_up_bias,
            down=factor(mlp.down_proj.weight),
            down_bias=mlp.down_proj.bias,
        )

    def __call__(self, x: Tensor, index: int, cos: Tensor, sin: Tensor, attention: Attention) -> Tensor:
        """``x``: [T, d]; ``cos``, ``sin``: [T, 1, D]. Returns [T, d]."""
        heads, kv_heads = self.heads, self.kv_heads
        qkv = linear(self.before.forward(x), self.qkv, self.qkv_bias).view(-1, heads + 2 * kv_heads, self.width)
        mixed = attention(index, *self._rotated(qkv, cos, sin), qkv.narrow(1, heads + kv_heads, kv_heads))
        x = x + linear(mixed.flatten(1), self.o, self.o_bias)
        gate, up = linear(self.between.forward(x), self.gate_up, self.gate_up_bias).chunk(2, -1)
        return x + linear(F.silu(gate) * up, self.down, self.down_bias)

    def _rotated(self, qkv: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        """Queries and keys: together, unless each has a norm of its own."""
        heads, kv_heads = self.heads, self.kv_heads
        if self.q_norm is None or self.k_norm is None:
            both = rotate(qkv.narrow(1, 0, heads + kv_heads), cos, sin)
            return both.narrow(1, 0, heads), both.narrow(1, heads, kv_heads)
        q, k = self.q_norm.forward(qkv.narrow(1, 0, heads)), self.k_norm.forward(qkv.narrow(1, heads, kv_heads))
        return rotate(q, cos, sin), rotate(k, cos, sin)


def _joined(*parts: Linear) -> tuple[Tensor, Tensor | None]:
    """The weights of one product that gives what all of them give, side by side; and its bias."""
    weight = torch.cat([part.weight for part in parts])
    return weight, None if parts[0].bias is None else torch.cat([part.bias for part in parts])
