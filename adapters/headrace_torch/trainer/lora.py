"""Low-rank adapters of linear layers (LoRA, Hu et al. 2021, arXiv 2106.09685): y = x Wᵀ + (x Aᵀ) (s B)ᵀ, s = alpha / r.

A is drawn as a linear layer's weight is in torch (uniform within ± 1 / sqrt(I)), B is 0. Invariant: what engines get is
what is multiplied by here, s in B, to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from functools import cached_property
from math import sqrt

import torch
import xxhash
from torch import Tensor, nn

from headrace.contract.adapters import adapter_names, is_adapter
from headrace.contract.columns import Array
from headrace.contract.weights import WeightSource
from headrace_torch.arrays import as_numpy, checksum
from headrace_torch.model import Decoder, Linear
from headrace_torch.products import linear
from headrace_torch.training_settings import LoraSettings


class AdaptedLinear(Linear):
    """A layer with an adapter. It has the layer's own weight, which is not trained."""

    lora_A: Linear
    lora_B: Linear

    def __init__(self, layer: Linear, *, rank: int, scale: float) -> None:
        """The adapter is uninitialised."""
        with torch.device("meta"):
            super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight, self.bias = layer.weight, layer.bias
        self.lora_A = Linear(layer.in_features, rank, bias=False, device=layer.weight.device)
        self.lora_B = Linear(rank, layer.out_features, bias=False, device=layer.weight.device)
        self._scale = scale

    def forward(self, input: Tensor) -> Tensor:
        """See above. [T, I] → [T, O]."""
        return super().forward(input) + linear(linear(input, self.lora_A.weight), self.scaled_b)

    @property
    def scaled_b(self) -> Tensor:
        """s B [O, r], in the layer's dtype."""
        return self._scale * self.lora_B.weight

    def merged(self) -> Linear:
        """A layer with the weight W + s B A, summed in float32 and rounded to the dtype of W."""
        with torch.device("meta"):
            whole = Linear(self.in_features, self.out_features, bias=self.bias is not None)
        product = self.scaled_b.float() @ self.lora_A.weight.float()
        whole.weight = nn.Parameter((self.weight.float() + product).to(self.weight.dtype))
        whole.bias = self.bias
        return whole


def add_adapter(model: Decoder, settings: LoraSettings, *, seed: int) -> None:
    """Have the targeted layers of ``model`` (float32) compute with an adapter, and leave nothing else to train. The
    same seed gives the same adapter on every device; the global random state is not used."""
    generator = torch.Generator(device="cpu").manual_seed(seed)
    model.requires_grad_(False)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, Linear) and name.rpartition(".")[2] in settings.targets:
            adapted = AdaptedLinear(layer, rank=settings.rank, scale=settings.scale)
            _draw(adapted, generator)
            _replace(model, name, adapted)


@torch.no_grad()
def _draw(layer: AdaptedLinear, generator: torch.Generator) -> None:
    bound = 1 / sqrt(layer.in_features)
    drawn = torch.empty(layer.lora_A.weight.shape).uniform_(-bound, bound, generator=generator)
    layer.lora_A.weight.copy_(drawn)
    layer.lora_B.weight.zero_()


@torch.no_grad()
def merged(model: Decoder) -> Decoder:
    """A model without an adapter that computes the same, to rounding. What had no adapter is shared with ``model``."""
    whole = copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})
    for name, layer in adapted_layers(model):
        _replace(whole, name, layer.merged())
    return whole


def adapted_layers(model: Decoder) -> Iterator[tuple[str, AdaptedLinear]]:
    """Those that have an adapter, by name, in the model's order."""
    for name, layer in model.named_modules():
        if isinstance(layer, AdaptedLinear):
            yield name, layer


def _replace(model: Decoder, name: str, layer: Linear) -> None:
    parent, _, last = name.rpartition(".")
    setattr(model.get_submodule(parent), last, layer)


class BaseWeights(WeightSource):
    """The weights that an adapter is for. They never change, so that a transport reads them once."""

    def __init__(self, model: Decoder) -> None:
        self._model = model

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """See :class:`WeightSource`; on a GPU the arrays are copies."""
        for name, parameter in self._model.named_parameters():
            if not is_adapter(name):
                yield name, as_numpy(parameter.detach().cpu())

    @cached_property
    def digest(self) -> str:
        """xxh3-128 over names and checksums, hexadecimal."""
        facts = [f"{name} {checksum(tensor)}\n" for name, tensor in self.tensors()]
        return xxhash.xxh3_128_hexdigest("".join(facts).encode())


class AdaptedWeights(WeightSource):
    """What the model computes with: the base, and A and s B of every layer that has them."""

    def __init__(self, model: Decoder, base: BaseWeights) -> None:
        self._model = model
        self.base = base

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """See :class:`WeightSource`."""
        assert self.base is not None
        yield from self.base.tensors()
        yield from self.changing()

    def changing(self) -> Iterator[tuple[str, Array]]:
        """The adapter's."""
        for name, layer in adapted_layers(self._model):
            a, b = adapter_names(f"{name}.weight")
            yield a, as_numpy(layer.lora_A.weight.detach().cpu())
            yield b, as_numpy(layer.scaled_b.detach().cpu())
