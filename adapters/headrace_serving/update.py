"""One weight update of an engine in other processes, seen from the event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from headrace.contract.columns import Array
from headrace.contract.inference import WeightUpdate
from headrace.contract.weights import WeightManifest
from headrace.errors import EngineError
from headrace_serving.staging import StagedWeights

_COPIED_IN_PLACE = 1 << 18
"""Bytes of a tensor that the event loop copies itself: handing it to a thread would take longer."""


class StagedUpdate(WeightUpdate):
    """Stages tensors beside what is served. ``commit``: makes what was staged the version that is served."""

    def __init__(
        self,
        manifest: WeightManifest,
        staged: StagedWeights | None,
        commit: Callable[[WeightManifest, StagedWeights], Awaitable[None]],
    ) -> None:
        """``staged``: None for a version that is live already."""
        self._manifest = manifest
        self._staged = staged
        self._commit = commit
        self._live = staged is None
        self._lock = asyncio.Lock()

    async def apply(self, name: str, tensor: Array) -> None:
        """Copy one tensor. What is wrong with it is told at :meth:`commit`."""
        async with self._lock:
            if self._live:
                return
            staged = self._open_stage()
            if tensor.nbytes <= _COPIED_IN_PLACE:
                staged.put(name, tensor)
            else:
                await asyncio.to_thread(staged.put, name, tensor)

    async def commit(self) -> None:
        """Verify all tensors and have the engine load them."""
        async with self._lock:
            if not self._live:
                await self._commit(self._manifest, self._open_stage())
                self._live = True
                self._free()

    async def abort(self) -> None:
        """Free what was staged; a committed version stays live."""
        async with self._lock:
            self._free()

    def _free(self) -> None:
        staged, self._staged = self._staged, None
        if staged is not None:
            staged.close()

    def _open_stage(self) -> StagedWeights:
        if self._staged is None:
            raise EngineError(
                f"the update to version {self._manifest.version} was aborted or replaced by another one",
                fix="begin the update again",
            )
        return self._staged
