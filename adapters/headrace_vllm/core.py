"""A running vLLM, in the adapter's words, wherever it runs.

Invariant: weights change only while nothing is being generated, in one session from start to finish; vLLM is asked
afterwards what it serves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from headrace.contract.generation import GenerationRequest
from headrace.errors import EngineError
from headrace_vllm.tokens import salt, sampling_arguments, tempering_arguments, version_of

T = TypeVar("T")

LOOK_SECONDS = 0.5
"""Between two looks whether vLLM lives, while it owes an answer."""


class Vllm(Protocol):
    """What is asked of vLLM, in this process (:mod:`headrace_vllm.own`) or of a server
    (:mod:`headrace_vllm.attached`)."""

    tells_versions: bool
    """vLLM reports with each answer which weights sampled its tokens, as it does from 0.32 on."""

    async def add(
        self, name: str, token_ids: Sequence[int], salt: str, arguments: Mapping[str, Any], *, stream: bool
    ) -> Any:
        """Where the replies to a request appear: ``get_nowait``, ``get`` and ``close``. ``arguments``: of
        ``SamplingParams``, less ``output_kind``."""

    async def abort(self, names: Sequence[str]) -> None:
        """Each ends with a last reply; unknown ones are ignored."""

    async def weight_version(self) -> str:
        """The label of the weights."""

    async def label(self, version: str) -> None:
        """Give the weights a label."""

    async def load(self, info: Mapping[str, Any]) -> None:
        """Take up the weights that ``info`` describes (``StagedWeights.update_info``), while paused."""

    async def pause(self) -> None:
        """No step is taken any more."""

    async def resume(self) -> None:
        """Steps are taken again, on keys and values of requests of now alone."""

    async def check(self) -> None:
        """Raises what is wrong when it is dead."""

    async def close(self) -> None:
        """Be done with it."""


class Core:
    """One vLLM."""

    def __init__(self, vllm: Vllm, *, context: int) -> None:
        """``context``: tokens of the longest sequence."""
        self.tells_versions = vllm.tells_versions
        self._vllm = vllm
        self._context = context

    async def add(self, request: GenerationRequest) -> Any:
        """Where its replies appear."""
        arguments = sampling_arguments(request, context=self._context)
        prompt = request.prompt.tolist()
        return await self._vllm.add(request.request_id, prompt, salt(request.version), arguments, stream=request.stream)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Each ends with a last reply; unknown ones are ignored."""
        await self._vllm.abort(request_ids)

    async def logprob(self, before: Sequence[int], token: int, *, version: int, temperature: float, name: str) -> float:
        """Of ``token`` after ``before``, as if it had been sampled: vLLM's log-probs of prompts are untempered."""
        arguments = {
            **tempering_arguments(temperature, greedy=False),
            "max_tokens": 1,
            "ignore_eos": True,
            "detokenize": False,
            "logprobs": 2,
            # A server tells of as many tokens as are asked for, the one that it sampled among them and before them.
            "logprob_token_ids": [token, 0 if token else 1],
        }
        replies = await self._vllm.add(name, before, salt(version), arguments, stream=False)
        try:
            reply = await replies.get()
        finally:
            replies.close()
        return float(reply.outputs[0].logprobs[0][token].logprob)

    async def version(self) -> int:
        """Of the weights that vLLM has, as it says."""
        return version_of(await self._answered(self._vllm.weight_version()))

    async def label(self, version: int) -> None:
        """Name the weights that vLLM has."""
        await self._vllm.label(str(version))
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
        await self._vllm.pause()
        await self._vllm.load(info)
        await self.label(version)
        await self._vllm.resume()

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
        await self._vllm.check()

    async def close(self) -> None:
        """End vLLM's processes and wait for them, if they are the adapter's own."""
        await self._vllm.close()
