"""Which layers of a model are low-bit, and giving them their weights."""

from __future__ import annotations

from torch import nn

from headrace.contract.columns import Array
from headrace.contract.quantization import Quantization, quantized, stem
from headrace.errors import EngineError
from headrace_torch.arrays import as_numpy
from headrace_torch.low_bit.weight import low_bit_weight
from headrace_torch.model import Decoder, Linear


def covered_layers(model: nn.Module, scheme: Quantization) -> dict[str, Linear]:
    """Name of the weight → layer, for those that the scheme covers. EngineError when it covers something else than the
    weight of a linear layer."""
    layers: dict[str, Linear] = {}
    for name, parameter in model.named_parameters():
        if not scheme.covers(name, shape=tuple(parameter.shape)):
            continue
        layer = model.get_submodule(name.rpartition(".")[0])
        if not isinstance(layer, Linear) or not name.endswith(".weight"):
            raise EngineError(
                f"{name} cannot be low-bit: it belongs to a {type(layer).__name__}, not to a linear layer",
                origin=f"quantisation scheme {type(scheme).__name__}",
                fix="keep it: quantization.keep names modules that stay as they are",
            )
        layers[name] = layer
    return layers


def quantize_model(model: Decoder, scheme: Quantization) -> dict[str, dict[str, Array]]:
    """Have the covered layers compute with what their weights are quantised to now. Name of the weight → its parts by
    full name."""
    found: dict[str, dict[str, Array]] = {}
    for name, layer in covered_layers(model, scheme).items():
        weight = layer.weight.detach()
        parts = found[name] = quantized(scheme, name, as_numpy(weight.float().cpu()))
        layer.low_bit = low_bit_weight(
            {full.removeprefix(stem(name)): part for full, part in parts.items()},
            scheme.format,
            columns=weight.shape[1],
            device=weight.device,
        )
    return found
