"""vLLM behind its adapter and without it, for ``engine_overhead.py``: two engines, since the adapter gives its own
arguments that cost something (a logits processor, a worker extension, numbers of each step)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

from headrace.contract import GenerationRequest, InferenceContext
from headrace_vllm.inference import VllmInferenceEngine
from headrace_vllm.launch import installed_version

KV_BYTES = 256 << 20


def version() -> str:
    """Of vLLM."""
    return str(installed_version())


class Sides:
    """``VllmInferenceEngine`` and ``AsyncLLM``."""

    async def start(self, model_path: str, *, slots: int) -> None:
        """The adapter first: it sets vLLM's environment, for both."""
        self._ours = VllmInferenceEngine(VllmInferenceEngine.Settings(slots=slots, kv_bytes=KV_BYTES))
        await self._ours.start(InferenceContext(name="ours", model_path=model_path, version=0, threads=1))
        self._outputs = self._ours.outputs()
        self._bare = await asyncio.to_thread(self._open_bare, model_path, slots)

    def _open_bare(self, model_path: str, slots: int) -> Any:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        return AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=model_path,
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype="float32",
                max_num_seqs=slots,
                enforce_eager=True,
                kv_cache_memory_bytes=KV_BYTES,
                logprobs_mode="processed_logprobs",
                disable_log_stats=True,
            )
        )

    async def ours(self, requests: Sequence[GenerationRequest]) -> int:
        """All are submitted together."""
        await self._ours.submit(requests)
        left, tokens = len(requests), 0
        while left:
            for output in await anext(self._outputs):
                tokens += len(output.token_ids)
                left -= output.finish_reason is not None
        return tokens

    async def bare(self, requests: Sequence[GenerationRequest]) -> int:
        """As vLLM's page shows it, each to its end."""
        return sum(await asyncio.gather(*(self._one(request) for request in requests)))

    async def _one(self, request: GenerationRequest) -> int:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        params = SamplingParams(
            temperature=1.0,
            max_tokens=request.sampling.max_new_tokens,
            seed=request.sampling.seed,
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": request.prompt.tolist()}
        async for reply in self._bare.generate(prompt, params, request.request_id):
            last = reply
        return len(last.outputs[0].token_ids)

    async def close(self) -> None:
        """Both engines."""
        await self._ours.close()
        await asyncio.to_thread(self._bare.shutdown)
