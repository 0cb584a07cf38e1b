"""Receiving the weights of a new policy version beside the one that is being served.

Invariant: a staged version becomes a model only when every tensor of the manifest arrived, with the
manifest's dtype, shape and checksum, and those tensors are exactly the model's. What a quantisation scheme covers
arrives low-bit, and stays as it is.
"""

from __future__ import annotations

import numpy as np
import torch
import xxhash

from headrace.contract.columns import Array
from headrace.contract.quantization import Quantization
from headrace.contract.weights import WeightManifest
from headrace_torch.arrays import as_tensor
from headrace_torch.low_bit.arriving import ArrivingLayers
from headrace_torch.model import Decoder, ModelConfig

_SHOWN = 5


class StagedWeights:
    """One version in the making. Used by one thread at a time."""

    def __init__(
        self,
        config: ModelConfig,
        manifest: WeightManifest,
        *,
        dtype: torch.dtype,
        device: str,
        scheme: Quantization | None = None,
    ) -> None:
        """EngineError when ``scheme`` covers what cannot be low-bit."""
        with torch.device("meta"):
            model = Decoder(config)
        self._low_bit = ArrivingLayers(model, scheme, device=device) if scheme else None
        self._parts = self._low_bit.parts if self._low_bit else {}
        self._model = model.to(dtype).to_empty(device=device).requires_grad_(False)
        self._targets = dict(self._model.named_parameters())
        self._shapes = {name: tuple(target.shape) for name, target in self._targets.items()}
        self._shapes.update({name: part.shape for name, part in self._parts.items()})
        self._infos = {info.name: info for info in manifest.tensors}
        self._staged: set[str] = set()
        self._faults: dict[str, str] = {}

    def put(self, name: str, tensor: Array) -> None:
        """Copy one tensor, cast to the engine's dtype unless it is low-bit. What is wrong with it is told by
        :meth:`problems`; putting it again, right, mends that."""
        fault = self._fault(name, tensor)
        if fault is not None:
            self._faults[name] = fault
            self._staged.discard(name)
            return
        self._faults.pop(name, None)
        if self._low_bit is not None and name in self._parts:
            self._low_bit.put(name, tensor)
        else:
            self._targets[name].copy_(as_tensor(np.array(tensor)))
        self._staged.add(name)

    def problems(self) -> list[str]:
        """Everything that keeps this version from being served; empty when it is complete."""
        problems = [f"{name}: {fault}" for name, fault in self._faults.items()]
        surplus = sorted(self._infos.keys() - self._shapes.keys())
        absent = sorted(self._shapes.keys() - self._infos.keys())
        missing = sorted((self._shapes.keys() & self._infos.keys()) - self._staged - self._faults.keys())
        for what, names in (
            ("the model has no", surplus),
            ("the manifest lacks", absent),
            ("never arrived:", missing),
        ):
            if names:
                problems.append(f"{what} {', '.join(names[:_SHOWN])}" + (" …" if len(names) > _SHOWN else ""))
        return problems

    def model(self) -> Decoder:
        """The complete model; ValueError while there are :meth:`problems`."""
        if self.problems():
            raise ValueError(f"incomplete weights: {self.problems()}")
        if self._low_bit is not None:
            self._low_bit.install()
        return self._model

    def _fault(self, name: str, tensor: Array) -> str | None:
        info, shape, part = self._infos.get(name), self._shapes.get(name), self._parts.get(name)
        if info is None:
            return "not in the manifest"
        if shape is None:
            return "not a tensor of this model"
        if tensor.dtype.name != info.dtype:
            return f"dtype {tensor.dtype.name}, the manifest says {info.dtype}"
        if part is not None and info.dtype != part.dtype:
            return f"dtype {info.dtype}, the quantisation scheme says {part.dtype}"
        if tensor.shape != info.shape or info.shape != shape:
            return f"shape {tensor.shape}, manifest {info.shape}, model {shape}"
        found = checksum(tensor)
        return None if found == info.checksum else f"checksum {found}, the manifest says {info.checksum}"


def checksum(tensor: Array) -> str:
    """xxh3-128 of the bytes in C order, hexadecimal (:class:`~headrace.contract.weights.TensorInfo`)."""
    return xxhash.xxh3_128_hexdigest(np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data)
