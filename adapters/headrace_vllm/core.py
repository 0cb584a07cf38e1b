"""A running vLLM, in the adapter's words.

Invariant: weights change only while nothing is being generated, in one session from start to finish; vLLM is asked
afterwards what it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, TypeVar

from headrace.contract.generation import GenerationRequest
from headrace.errors import EngineError
from headrace_vllm.tokens import salt, sampling_arguments, tempering_arguments, version_of

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""Between two looks whether vLLM lives, while it owes an answer."""


class Core:
    """``engine``: an ``AsyncLLM`` (:func:`headrace_vllm.launch.open_engine`)."""

    def __init__(self, engine: Any, *, context: int) -> None:
        """``context``: tokens of the longest sequence."""
        from vllm import SamplingParams
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest
        from vllm.outputs import CompletionOutput
        from vllm.sampling_params import RequestOutputKind

        self.tells_versions = "weight_versions" in CompletionOutput.__dataclass_fields__
        """vLLM reports with each answer which weights sampled its tokens, as it does from 0.32 on."""
        self._engine = engine
        self._context = context
        self._params: Any = SamplingParams
        self._kinds: Any = RequestOutputKind
        self._update: Any = WeightTransferUpdateRequest

    async def add(self, request: GenerationRequest) -> Any:
        """Where its replies appear: ``get_nowait``, ``get`` and ``close`` of vLLM's collector."""
        kind = self._kinds.DELTA if request.stream else self._kinds.FINAL_ONLY
        arguments = sampling_arguments(request, context=self._context)
        return await self._engine.add_request(
            request.request_id,
            _prompt(request.prompt.tolist(), request.version),
            self._params(**arguments, output_kind=kind),
        )

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Each ends with a last reply; unknown ones are ignored."""
        await self._engine.abort(list(request_ids))

    async def logprob(self, before: Sequence[int], token: int, *, version: int, temperature: float, name: str) -> float:
        """Of ``token`` after ``before``, as if it had been sampled: vLLM's log-probs of prompts are untempered."""
        params = self._params(
            **tempering_arguments(temperature, greedy=False),
            max_tokens=1,
            ignore_eos=True,
            detokenize=False,
            logprob_token_ids=[token],
            output_kind=self._kinds.FINAL_ONLY,
        )
        replies = await self._engine.add_request(name, _prompt(before, version), params)
        try:
            reply = await replies.get()
        finally:
            replies.close()
        return float(reply.outputs[0].logprobs[0][token].logprob)

    async def version(self) -> int:
        """Of the weights that vLLM has, as it says."""
        return version_of(await self._answered(self._engine.get_weight_version()))

    async def label(self, version: int) -> None:
        """Name the weights that vLLM has."""
        await self._engine.update_weight_version(str(version))
        reported = await self.version()
        if reported != version:
            raise EngineError(
                f"vLLM was given version {version} and reports version {reported}",
                fix="use a release of vLLM that the adapter was tested with",
            )

    async def load(self, info: Mapping[str, Any], version: int) -> None:
        """Have vLLM take up the staged weights, while nothing is being generated. What it raises leaves it with weights
        of which nobody knows what they are."""
        await self._answered(self._load(info, version))

    async def _load(self, info: Mapping[str, Any], version: int) -> None:
        engine = self._engine
        await engine.pause_generation(mode="keep", clear_cache=True)  # a step between two of these calls would kill it
        await engine.start_weight_update()
        await engine.update_weights(self._update(update_info=dict(info)))
        await engine.finish_weight_update()
        await self.label(version)
        await engine.resume_generation()
        await engine.reset_prefix_cache()

    async def _answered(self, asked: Coroutine[Any, Any, T]) -> T:
        """What vLLM was asked: of a process that has died no answer comes, nor an error. Raises what it says when it is
        dead."""
        answer = asyncio.ensure_future(asked)
        try:
            while not (await asyncio.wait({answer}, timeout=LOOK_SECONDS))[0]:
                await self.check()
            return answer.result()
        finally:
            answer.cancel()

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


def _prompt(token_ids: Sequence[int], version: int) -> dict[str, Any]:
    """What vLLM's renderer makes of token ids: there is nothing left to render."""
    return {"type": "token", "prompt_token_ids": list(token_ids), "cache_salt": salt(version)}
