"""One weight update of the ``torch`` inference engine, seen from the event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from headrace.contract.columns import Array
from headrace.contract.inference import WeightUpdate
from headrace.contract.weights import WeightManifest

if TYPE_CHECKING:
    from headrace_torch.decode.staging import StagedWeights
    from headrace_torch.inference import TorchInferenceEngine

_COPIED_IN_PLACE = 1 << 18
"""Bytes of a tensor that the event loop copies itself: handing it to a thread would take longer."""


class TorchWeightUpdate(WeightUpdate):
    """Stages tensors on a helper thread, so that neither the event loop nor decoding waits for them."""

    def __init__(self, engine: TorchInferenceEngine, manifest: WeightManifest, staged: StagedWeights | None) -> None:
        """``staged``: None for a version that is live already."""
        self._engine = engine
        self._manifest = manifest
        self._staged = staged
        self._live = staged is None
        self._lock = asyncio.Lock()

    def wants(self, name: str) -> bool:
        """Nothing of a version that is live; of another, not the base that is there."""
        return self._staged is not None and self._staged.wants(name)

    async def apply(self, name: str, tensor: Array) -> None:
        """Copy one tensor. What is wrong with it is told at :meth:`commit`."""
        async with self._lock:
            if self._live:
                return
            stage = self._open_stage()
            if tensor.nbytes <= _COPIED_IN_PLACE:
                stage.put(name, tensor)
            else:
                await asyncio.to_thread(stage.put, name, tensor)

    async def commit(self) -> None:
        """Verify all tensors and make the version live."""
        async with self._lock:
            if not self._live:
                self._engine._commit(self._manifest, self._open_stage())
                self._live, self._staged = True, None

    async def abort(self) -> None:
        """Free what was staged; a committed version stays live."""
        async with self._lock:
            self._staged = None

    def _open_stage(self) -> StagedWeights:
        if self._staged is None:
            raise self._engine._error(
                f"the update to version {self._manifest.version} was aborted or replaced by another one",
                fix="begin the update again",
            )
        return self._staged
