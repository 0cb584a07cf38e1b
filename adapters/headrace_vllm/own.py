"""A vLLM of this process: its ``AsyncLLM``, in the words of :mod:`headrace_vllm.core`."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any


class OwnVllm:
    """``engine``: an ``AsyncLLM`` (:func:`headrace_vllm.launch.open_engine`)."""

    def __init__(self, engine: Any) -> None:
        from vllm import SamplingParams
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.outputs import CompletionOutput
        from vllm.sampling_params import RequestOutputKind

        self.tells_versions = "weight_versions" in CompletionOutput.__dataclass_fields__
        self._engine = engine
        self._params: Any = SamplingParams
        self._kinds: Any = RequestOutputKind
        self._update: Any = WeightTransferUpdateRequest

    async def add(
        self, name: str, token_ids: Sequence[int], salt: str, arguments: Mapping[str, Any], *, stream: bool
    ) -> Any:
        """vLLM's collector of the replies. The prompt is what vLLM's renderer makes of token ids: there is nothing left
        to render."""
        kind = self._kinds.DELTA if stream else self._kinds.FINAL_ONLY
        prompt = {"type": "token", "prompt_token_ids": list(token_ids), "cache_salt": salt}
        return await self._engine.add_request(name, prompt, self._params(**arguments, output_kind=kind))

    async def abort(self, names: Sequence[str]) -> None:
        """Each ends with a last reply."""
        await self._engine.abort(list(names))

    async def weight_version(self) -> str:
        """The label of the weights."""
        return str(await self._engine.get_weight_version())

    async def label(self, version: str) -> None:
        """Give the weights a label."""
        await self._engine.update_weight_version(version)

    async def load(self, info: Mapping[str, Any]) -> None:
        """One session of vLLM's weight transfer. A step between two of its calls would end vLLM: it must be paused."""
        await self._engine.start_weight_update()
        await self._engine.update_weights(self._update(update_info=dict(info)))
        await self._engine.finish_weight_update()

    async def pause(self) -> None:
        """No step is taken any more."""
        await self._engine.pause_generation(mode="keep", clear_cache=True)

    async def resume(self) -> None:
        """Steps are taken again, on keys and values of requests of now alone."""
        await self._engine.resume_generation()
        await self._engine.reset_prefix_cache()

    async def check(self) -> None:
        """Raises what vLLM says when it is dead."""
        await self._engine.check_health()

    async def close(self) -> None:
        """End vLLM's processes and wait for them."""
        engine, self._engine = self._engine, None
        listening = getattr(engine, "output_handler", None)
        if listening is not None:
            listening.cancel()  # else it reports that what it listens to has died
            await asyncio.wait([listening])
        await asyncio.to_thread(engine.shutdown)
