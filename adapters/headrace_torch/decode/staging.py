"""Receiving the weights of a new policy version beside the one that is being served.

Invariant: a staged version becomes a model only when every tensor of the manifest arrived, with the
manifest's dtype, shape and checksum, and those tensors are exactly the model's. What a quantisation scheme covers
arrives low-bit, and stays as it is. A base that is there already, to the bit, need not arrive again.
"""

from __future__ import annotations

import numpy as np
import torch

from headrace.contract.adapters import is_adapter
from headrace.contract.columns import Array
from headrace.contract.quantization import Quantization
from headrace.contract.weights import WeightManifest
from headrace_torch.arrays import as_tensor, checksum
from headrace_torch.decode.adapters import AdaptedModel, ArrivingAdapter, SharedBase
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
        base: SharedBase | None = None,
    ) -> None:
        """``base``: one that is there. EngineError when ``scheme`` covers what cannot be low-bit."""
        with torch.device("meta"):
            model = Decoder(config)
        self._low_bit = ArrivingLayers(model, scheme, device=device) if scheme else None
        self._parts = self._low_bit.parts if self._low_bit else {}
        self._adapter = ArrivingAdapter(model, manifest.tensors, dtype=dtype, device=device)
        self._shapes = {name: tuple(target.shape) for name, target in model.named_parameters()}
        self._shapes.update({name: part.shape for name, part in self._parts.items()})
        self._shapes.update(self._adapter.shapes)
        self._infos = {info.name: info for info in manifest.tensors}
        own = frozenset(info for info in manifest.tensors if not is_adapter(info.name))
        self._held = bool(self._adapter.shapes) and base is not None and base.infos == own
        self._staged = {info.name for info in own} if self._held else set()
        self._faults: dict[str, str] = {}
        self._model = model if self._held else model.to(dtype).to_empty(device=device).requires_grad_(False)
        self._targets = dict(self._model.named_parameters())
        self.base: SharedBase | None = None
        """That of the version, if it has an adapter."""
        if self._adapter.shapes:
            self.base = base if self._held else SharedBase(self._model, own)

    def wants(self, name: str) -> bool:
        """False for the tensors of a base that is there."""
        return not self._held or is_adapter(name)

    def put(self, name: str, tensor: Array) -> None:
        """Copy one tensor, cast to the engine's dtype unless it is low-bit. What is wrong with it is told by
        :meth:`problems`; putting it again, right, mends that."""
        if not self.wants(name):
            return
        fault = self._fault(name, tensor)
        if fault is not None:
            self._faults[name] = fault
            self._staged.discard(name)
            return
        self._faults.pop(name, None)
        if self._low_bit is not None and name in self._parts:
            self._low_bit.put(name, tensor)
        elif name in self._adapter.shapes:
            self._adapter.put(name, tensor)
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

    def model(self) -> Decoder | AdaptedModel:
        """The complete model; ValueError while there are :meth:`problems`."""
        if self.problems():
            raise ValueError(f"incomplete weights: {self.problems()}")
        if self._low_bit is not None and not self._held:
            self._low_bit.install()
        return self._model if self.base is None else AdaptedModel(self.base, self._adapter.pairs())

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
