"""Attention of one step: running sequences with one new token each, and prompts that join.

The linear layers of both kinds run as one flat batch; only here they part. One query per sequence is
computed as two batched matrix products over views of the arena (measured on one CPU thread: 1.5 to 2
times as fast as ``scaled_dot_product_attention``); prompts use the fused causal kernel.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace_torch.decode.arena import KeyValueArena


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """Arena rows ``first`` to ``first + count`` with one new token each, attending over ``longest`` keys."""

    first: int
    count: int
    longest: int
    bias: Tensor
    """[count * KV, 1, longest]: 0 where a row has a key, -inf beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Joining prompts: arena rows ``first`` to ``first + count``, padded to ``longest`` for the kernel alone."""

    first: int
    count: int
    longest: int
    padded_index: Tensor | None
    """int64 [sum of lengths]: where each prompt token stands in [count * longest]; None when all are equal."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepAttention:
    """The attention object of one step. Tokens: first one per running row, then the prompts, packed."""

    arena: KeyValueArena
    write_index: Tensor
    """int64 [T * KV]: flat arena positions of the step's keys and values."""
    running: Sequence[Running]
    """The rows with one new token, in order; neighbours that attend together."""
    prompts: Prompts | None

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """As :class:`headrace_torch.model.Attention`; writes the step's keys and values first."""
        width = k.shape[-1]
        index = (self.write_index,)
        self.arena.flat_keys[layer].index_put_(index, k.reshape(-1, width))
        self.arena.flat_values[layer].index_put_(index, v.reshape(-1, width))
        mixed = [self._running(part, layer, q, k.shape[1]) for part in self.running]
        if self.prompts is not None:
            mixed.append(self._prompts(self.prompts, layer, q[self.prompts.first :], k.shape[1]))
        return mixed[0] if len(mixed) == 1 else torch.cat(mixed)

    def _running(self, part: Running, layer: int, q: Tensor, kv_heads: int) -> Tensor:
        _, heads, width = q.shape
        first, batch = part.first * kv_heads, part.count * kv_heads
        keys = self.arena.keys[layer].narrow(0, first, batch).narrow(1, 0, part.longest)
        values = self.arena.values[layer].narrow(0, first, batch).narrow(1, 0, part.longest)
        grouped = q.narrow(0, part.first, part.count).reshape(batch, heads // kv_heads, width)
        scores = torch.baddbmm(part.bias, grouped, keys.transpose(1, 2), alpha=1 / math.sqrt(width))
        return torch.bmm(torch.softmax(scores, -1), values).view(part.count, heads, width)

    def _prompts(self, prompts: Prompts, layer: int, q: Tensor, kv_heads: int) -> Tensor:
        _, heads, width = q.shape
        rows, longest = prompts.count, prompts.longest
        keys = self.arena.keys[layer].narrow(0, prompts.first * kv_heads, rows * kv_heads).narrow(1, 0, longest)
        values = self.arena.values[layer].narrow(0, prompts.first * kv_heads, rows * kv_heads).narrow(1, 0, longest)
        if prompts.padded_index is not None:
            padded = q.new_zeros(rows * longest, heads, width)
            padded.index_copy_(0, prompts.padded_index, q)
            q = padded
        # Right padding needs no mask: under a causal mask it is seen by padding alone.
        mixed = F.scaled_dot_product_attention(
            q.view(rows, longest, heads, width).transpose(1, 2),
            keys.view(rows, kv_heads, longest, width),
            values.view(rows, kv_heads, longest, width),
            is_causal=True,
            enable_gqa=heads != kv_heads,
        )
        flat = mixed.transpose(1, 2).reshape(rows * longest, heads, width)
        return flat if prompts.padded_index is None else flat.index_select(0, prompts.padded_index)


def length_bias(lengths: Tensor, *, longest: int, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """The bias of :class:`Running` for rows with ``lengths`` keys (int64 [n])."""
    beyond = torch.arange(longest, device=lengths.device) >= lengths.unsqueeze(1)
    bias = torch.zeros(beyond.shape, dtype=dtype, device=lengths.device).masked_fill_(beyond, -math.inf)
    return bias.unsqueeze(1).expand(-1, kv_heads, -1).reshape(-1, 1, longest)
