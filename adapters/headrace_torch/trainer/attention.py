"""Causal attention over packed rows, exact and block-diagonal.

Rows of similar length are gathered into right-padded blocks: under a causal mask a row never sees what lies to its
right, so padding needs no mask, and rows of a block cannot see each other at all.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from headrace_torch.trainer.packing import Bucket


class PackedAttention:
    """The model's :class:`~headrace_torch.model.Attention` for one plan."""

    def __init__(self, buckets: Sequence[Bucket], attended: Tensor, *, device: torch.device) -> None:
        """``attended``: int64 [U], as in the plan."""
        self._shapes = [bucket.nodes.shape for bucket in buckets]
        nodes = [torch.from_numpy(bucket.nodes.reshape(-1)) for bucket in buckets]
        self._nodes = torch.cat(nodes).to(device)
        self._attended = attended

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """``q``: [U, H, D]; ``k``, ``v``: [U, KV, D]. Returns [U, H, D]."""
        grouped = q.shape[1] != k.shape[1]
        sizes = [rows * length for rows, length in self._shapes]
        blocks = zip(*(torch.split(rows_of(x, self._nodes), sizes) for x in (q, k, v)), strict=True)
        outputs = []
        for (rows, length), block in zip(self._shapes, blocks, strict=True):
            query, key, value = (x.view(rows, length, *x.shape[1:]).transpose(1, 2) for x in block)
            mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
            outputs.append(mixed.transpose(1, 2).reshape(rows * length, *q.shape[1:]))
        return rows_of(torch.cat(outputs), self._attended)


def rows_of(x: Tensor, index: Tensor) -> Tensor:
    """``x[index]`` along the first axis. The gradient of an embedding look-up sums repeated rows in a fixed order on
    every device, which that of plain indexing does not."""
    return F.embedding(index, x.flatten(1)).view(len(index), *x.shape[1:])
