"""A :class:`~headrace_torch.model.Decoder` made flat for decoding.

With a few rows per step, calls cost more than arithmetic: query, key and value are one product here, gate and up
another, rotary angles are looked up, and no module is called. Invariant: the same function of the same weights, to
rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
        self.embedding = model.model.embed_tokens.weight
        self._head = _by(self.embedding, None) if model.config.tie_word_embeddings else _product(model.lm_head)
        self._layers = [_Layer.of(cast(DecoderLayer, layer)) for layer in model.model.layers]
        self._norm: RMSNorm = model.model.norm
        positions = torch.arange(max_length, device=self.embedding.device)
        self._cos, self._sin = model.rotary.angles(positions, self.embedding.dtype)

    def hidden(self, tokens: Tensor, positions: Tensor, attention: Attention) -> Tensor:
        """Hidden states [T, d] after the final norm; see :meth:`Decoder.forward`."""
        x = F.embedding(tokens, self.embedding)
        cos, sin = self._cos.index_select(0, positions), self._sin.index_select(0, positions)
        for index, layer in enumerate(self._layers):
            x = layer(x, index, cos, sin, attention)
        return self._norm.forward(x)

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [T, V] for hidden states [T, d]."""
        return self._head(hidden).float()

    def adapted(self, pairs: Mapping[str, tuple[Tensor, Tensor]]) -> FlatDecoder:
        """The same weights, which both share, with an adapter. ``pairs``: name of a layer's weight → A and B."""
        other = copy.copy(self)
        prefixes = (f"model.layers.{index}." for index in range(len(self._layers)))
        inner = self.config.intermediate_size
        other._layers = [
            layer.adapted(pairs, prefix, inner=inner) for layer, prefix in zip(self._layers, prefixes, strict=True)
        ]
        return other

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.embedding.device


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

    def adapted(self, pairs: Mapping[str, tuple[Tensor, Tensor]], prefix: str, *, inner: int) -> _Layer:
        """``prefix``: of the layer's names in ``pairs``; ``inner``: outputs of gate and of up."""

        def of(*names: str) -> list[tuple[Tensor, Tensor] | None]:
            return [pairs.get(f"{prefix}{name}.weight") for name in names]

        q, kv = self.heads * self.width, self.kv_heads * self.width
        d = self.before.weight.shape[0]
        return replace(
            self,
            qkv=_with(self.qkv, of("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), outputs=(q, kv, kv)),
            o=_with(self.o, of("self_attn.o_proj"), outputs=(d,)),
            gate_up=_with(self.gate_up, of("mlp.gate_proj", "mlp.up_proj"), outputs=(inner, inner)),
            down=_with(self.down, of("mlp.down_proj"), outputs=(d,)),
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


def _with(product: Product, pairs: Sequence[tuple[Tensor, Tensor] | None], *, outputs: Sequence[int]) -> Product:
    """A product of layers side by side, each with its pair of an adapter, where it has one. ``outputs``: of each."""
    present = [pair for pair in pairs if pair is not None]
    if not present:
        return product
    a, b = factor(torch.cat([down for down, _ in present])), factor(_blocks(pairs, outputs))
    if b.dtype == present[0][1].dtype:  # no product is to be rounded on its way: it is added as it is made
        return lambda x: torch.addmm(product(x), F.linear(x, a), b.T)
    return lambda x: product(x) + linear(linear(x, a), b)


def _blocks(pairs: Sequence[tuple[Tensor, Tensor] | None], outputs: Sequence[int]) -> Tensor:
    """[sum of outputs, sum of ranks]: each B at the rows of its layer and the columns of its A, 0 elsewhere."""
    some = next(up for pair in pairs if pair is not None for up in pair[1:])
    whole = some.new_zeros(sum(outputs), sum(pair[1].shape[1] for pair in pairs if pair is not None))
    row = column = 0
    for pair, rows in zip(pairs, outputs, strict=True):
        if pair is not None:
            columns = pair[1].shape[1]
            whole[row : row + rows, column : column + columns] = pair[1]
            column += columns
        row += rows
    return whole
