"""Low-bit layers of a model whose weights are on their way, part by part."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from headrace.contract.columns import Array
from headrace.contract.quantization import SCALE, LowBitFormat, Quantization, part_kinds, stem
from headrace_torch.low_bit.layers import covered_layers
from headrace_torch.low_bit.weight import LowBitWeight, unpacked
from headrace_torch.model import Decoder, Linear


class Part(NamedTuple):
    """Of one layer's weight."""

    dtype: str
    shape: tuple[int, int]
    is_scale: bool
    columns: int
    """Inputs of the layer."""


class ArrivingLayers:
    """Those of ``model`` that ``scheme`` covers. Their own weights are taken off: no memory is made for them."""

    def __init__(self, model: Decoder, scheme: Quantization, *, device: str) -> None:
        """EngineError when the scheme covers what cannot be low-bit."""
        self.format: LowBitFormat = scheme.format
        self.parts: dict[str, Part] = {}
        """By full name."""
        self._device = device
        self._layers: list[tuple[Linear, list[str]]] = []
        self._arrived: dict[str, Tensor] = {}
        for name, layer in covered_layers(model, scheme).items():
            shape = tuple(layer.weight.shape)
            kinds = part_kinds(self.format, shape=shape)
            own = {f"{stem(name)}{kind}": Part(*kinds[kind], kind == SCALE, shape[1]) for kind in kinds}
            self.parts.update(own)
            self._layers.append((layer, list(own)))
            layer.register_parameter("weight", None)

    def put(self, name: str, tensor: Array) -> None:
        """Copy one part."""
        part = self.parts[name]
        copy = (
            torch.from_numpy(np.array(tensor)) if part.is_scale else unpacked(tensor, self.format, columns=part.columns)
        )
        self._arrived[name] = copy.to(self._device)

    def install(self) -> None:
        """Give the layers their weights. KeyError while a part is missing."""
        for layer, (values, scales) in self._layers:
            layer.low_bit = LowBitWeight.of(self._arrived[values], self._arrived[scales], self.format)
