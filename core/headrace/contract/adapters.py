"""Low-rank adapters (LoRA, Hu et al. 2021, arXiv 2106.09685), as versions have them.

A trainer may leave the weights it began with as they are, and train an adapter: of the weight W [O, I] of some linear
layers, two matrices whose product is added to it. A version is then the weights of that *base* under their own names,
and for each such weight ``….weight``

    ….lora_A.weight    A [r, I]
    ….lora_B.weight    B [O, r], with whatever scale the trainer has (alpha / r) in it

The layer computes with W + B A. The rank r may differ from layer to layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from headrace.contract.columns import Array

LORA_A, LORA_B = "lora_A.weight", "lora_B.weight"
_WEIGHT = "weight"


def adapter_names(weight: str) -> tuple[str, str]:
    """Names of A and B for the linear layer's ``weight``."""
    layer = weight.removesuffix(_WEIGHT)
    return layer + LORA_A, layer + LORA_B


def is_adapter(name: str) -> bool:
    """Whether a tensor of this name belongs to an adapter."""
    return name.endswith((f".{LORA_A}", f".{LORA_B}"))


def adapted_weight(name: str) -> str:
    """Name of the weight that the adapter's tensor ``name`` is for."""
    return name.removesuffix(LORA_A).removesuffix(LORA_B) + _WEIGHT


def merged(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """The weights that a version with an adapter stands for: W + B A, summed in float32 and rounded to the dtype of
    W."""
    found = {name: tensor for name, tensor in tensors.items() if not is_adapter(name)}
    for name in {adapted_weight(name) for name in tensors if is_adapter(name)}:
        weight, (a, b) = tensors[name], (tensors[part].astype(np.float32) for part in adapter_names(name))
        found[name] = (weight.astype(np.float32) + b @ a).astype(weight.dtype)
    return found
