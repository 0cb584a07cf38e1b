"""Keys and values of one policy version's running sequences.

Invariant: row ``i`` of the arena belongs to running sequence ``i``; rows are dense from 0, so that a decode
step works on views and never gathers. Unused entries are finite, because attention multiplies them by zero.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.contract.columns import Array
from headrace_torch.arrays import as_numpy, as_tensor
from headrace_torch.model import ModelConfig

_LEAST_ROWS = 8
_LEAST_LENGTH = 64


@dataclass(frozen=True, slots=True)
class Shape:
    """``rows`` sequences, with room for ``length`` tokens each."""

    rows: int
    length: int

    @property
    def tokens(self) -> int:
        """Of all."""
        return self.rows * self.length

    def joined(self, length: int) -> Shape:
        """With one more sequence, of so many tokens."""
        return Shape(self.rows + 1, max(self.length, length))


class KeyValueArena:
    """Grows to the rows and the length that were asked for, up to ``rows`` x ``length`` tokens. It may be of another
    shape in the next moment; a change takes the memory of both until what is held has been copied."""

    def __init__(self, config: ModelConfig, *, rows: int, length: int, dtype: torch.dtype, device: str) -> None:
        self._config = config
        self._most_rows, self._most_length = rows, length
        self._dtype, self._device = dtype, device
        self._store = self._allocate(0, 0)
        self.rows = 0
        self.length = 0
        """Tokens that a row has room for: the stride between the heads of a row."""
        self.keys: list[Tensor] = []
        """Per layer, [rows * KV, length, D]."""
        self.values: list[Tensor] = []
        self.flat_keys: list[Tensor] = []
        """Per layer, [rows * KV * length, D]."""
        self.flat_values: list[Tensor] = []

    def _allocate(self, rows: int, length: int) -> Tensor:
        c = self._config
        shape = (c.num_hidden_layers, 2, rows, c.num_key_value_heads, length, c.head_dim)
        return torch.zeros(shape, dtype=self._dtype, device=self._device)

    def reserve(self, *, rows: int, length: int) -> None:
        """Make room for ``rows`` sequences of ``length`` tokens."""
        self.become(self.grown(Shape(rows, length)))

    @property
    def shape(self) -> Shape:
        """What there is room for."""
        return Shape(self.rows, self.length)

    def grown(self, need: Shape) -> Shape:
        """Room for ``need``, and for what there is room for already; doubling keeps copies rare."""
        if need.rows <= self.rows and need.length <= self.length:
            return self.shape
        return Shape(
            _grown(self.rows, need.rows, least=_LEAST_ROWS, most=self._most_rows),
            _grown(self.length, need.length, least=_LEAST_LENGTH, most=self._most_length),
        )

    def covering(self, need: Shape) -> Shape:
        """The same with no more than that takes."""
        least = self.least(need)
        return Shape(max(self.rows, least.rows), max(self.length, least.length))

    def least(self, need: Shape) -> Shape:
        """Room for ``need`` alone, and for its sequences to grow a little."""
        length = -(-need.length // _LEAST_LENGTH) * _LEAST_LENGTH
        return Shape(need.rows, min(length, self._most_length))

    def become(self, shape: Shape) -> None:
        """Have room for ``shape``, which all that is in use is within."""
        if shape == self.shape:
            return
        store = self._allocate(shape.rows, shape.length)
        rows, length = min(self.rows, shape.rows), min(self.length, shape.length)
        store[:, :, :rows, :, :length] = self._store[:, :, :rows, :, :length]
        self._store, self.rows, self.length = store, shape.rows, shape.length
        self.keys = [layer[0].flatten(0, 1) for layer in store]
        self.values = [layer[1].flatten(0, 1) for layer in store]
        self.flat_keys = [layer.flatten(0, 1) for layer in self.keys]
        self.flat_values = [layer.flatten(0, 1) for layer in self.values]

    def move(self, sources: list[int], targets: list[int], *, length: int) -> None:
        """Copy the first ``length`` tokens of rows ``sources`` over rows ``targets``."""
        used = self._store.narrow(4, 0, length)
        source = torch.tensor(sources, device=self._device)
        target = torch.tensor(targets, device=self._device)
        used.index_copy_(2, target, used.index_select(2, source))

    def read(self, row: int, *, length: int) -> tuple[Array, ...]:
        """A copy of the first ``length`` tokens of a row, per layer [2, KV, length, D]: keys, then values."""
        used = self._store[:, :, row, :, :length].clone(memory_format=torch.contiguous_format)
        return tuple(as_numpy(used.cpu()))

    def write(self, row: int, kv: Sequence[Array]) -> None:
        """The first tokens of a row, as :meth:`read` gave them; there is room for them."""
        for layer, array in zip(self._store, kv, strict=True):
            layer[:, row, :, : array.shape[2]] = as_tensor(np.require(array, requirements="W"))


def _grown(now: int, need: int, *, least: int, most: int) -> int:
    size = max(now, min(least, most))
    while size < need:
        size = min(2 * size, most)
    return size
