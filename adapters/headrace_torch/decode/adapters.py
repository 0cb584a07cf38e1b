"""Versions that are a base and an adapter (:mod:`headrace.contract.adapters`).

The base lies in memory once, whatever number of versions have it, and layers add what their adapter gives: y = x Wᵀ +
(x Aᵀ) Bᵀ, as the trainer computes it. Merged into W, an adapter would cost no time and each version a whole model, and
bfloat16 would round away what is small beside W. Invariant: nothing is served of an adapter that has half of a pair.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from headrace.contract.adapters import LORA_A, adapted_weight, adapter_names, is_adapter
from headrace.contract.columns import Array
from headrace.contract.weights import TensorInfo
from headrace_torch.arrays import as_tensor
from headrace_torch.decode.flat import FlatDecoder
from headrace_torch.model import Decoder, Linear

Pairs = Mapping[str, tuple[Tensor, Tensor]]
"""Name of a layer's weight → its A and B."""


class SharedBase:
    """The weights that versions have in common. ``infos``: what they were verified against."""

    def __init__(self, model: Decoder, infos: frozenset[TensorInfo]) -> None:
        self.infos = infos
        self._model: Decoder | FlatDecoder = model

    def flat(self, *, max_length: int) -> FlatDecoder:
        """Made once, on the decode thread, of the model."""
        if isinstance(self._model, Decoder):
            self._model = FlatDecoder(self._model, max_length=max_length)
        return self._model


@dataclass(frozen=True, slots=True, eq=False)
class AdaptedModel:
    """A version of a base."""

    base: SharedBase
    pairs: Pairs


def flattened(model: Decoder | AdaptedModel, *, max_length: int) -> FlatDecoder:
    """Ready to decode."""
    if isinstance(model, AdaptedModel):
        return model.base.flat(max_length=max_length).adapted(model.pairs)
    return FlatDecoder(model, max_length=max_length)


class ArrivingAdapter:
    """An adapter on its way, tensor by tensor."""

    def __init__(self, model: Decoder, infos: Iterable[TensorInfo], *, dtype: torch.dtype, device: str) -> None:
        """``infos``: a manifest's, of which other tensors than an adapter's are ignored."""
        ranks = {
            adapted_weight(info.name): info.shape[0]
            for info in infos
            if is_adapter(info.name) and info.name.endswith(LORA_A) and info.shape
        }
        self.shapes: dict[str, tuple[int, ...]] = {}
        """Of the tensors that layers of ``model`` can have of it; the rank is that of A."""
        for name, layer in model.named_modules():
            weight = f"{name}.weight"
            if isinstance(layer, Linear) and weight in ranks:
                a, b = adapter_names(weight)
                self.shapes |= {a: (ranks[weight], layer.in_features), b: (layer.out_features, ranks[weight])}
        self._dtype, self._device = dtype, device
        self._arrived: dict[str, Tensor] = {}

    def put(self, name: str, tensor: Array) -> None:
        """Copy one tensor, cast to the engine's dtype."""
        self._arrived[name] = as_tensor(np.array(tensor)).to(device=self._device, dtype=self._dtype)

    def pairs(self) -> Pairs:
        """KeyError while one is missing."""
        weights = {adapted_weight(name): adapter_names(adapted_weight(name)) for name in self.shapes}
        return {weight: (self._arrived[a], self._arrived[b]) for weight, (a, b) in weights.items()}
