"""A running SGLang server, in the adapter's words.

Invariant: weights change only while nothing is being generated, in one session from pause to continue; SGLang is asked
afterwards what it serves.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace.contract.generation import GenerationOutput, GenerationRequest
from headrace.errors import EngineError
from headrace_serving.engine import Backend
from headrace_serving.staging import StagedWeights
from headrace_sglang.client import Client
from headrace_sglang.tokens import Answer, generate_body, logprob_body, version_of

LOOK_SECONDS = 0.5
"""For an answer to how much there is to do: SGLang gives it between two steps."""
AGAIN_SECONDS = 0.1
"""Until an abort is sent again: SGLang ignores one that overtakes its request."""


class Held(Protocol):
    """A server that is this instance's."""

    def check(self) -> None:
        """EngineError when it is known to have ended."""

    async def close(self) -> None:
        """End it, if this process has started it."""


@dataclass(frozen=True, slots=True, eq=False)
class _Open:
    """A request that has no last output yet."""

    name: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)


class SglangBackend(Backend):
    """``context``: tokens of the longest sequence."""

    def __init__(self, client: Client, server: Held, *, context: int) -> None:
        self._client = client
        self._server = server
        self._context = context
        self._open: dict[str, _Open] = {}
        self._own, self._asked = secrets.token_hex(8), 0

    def _name(self) -> str:
        """Of a request, for SGLang, whose aborts end whatever has a name that begins like the given one, and come
        seconds after a client has gone: no name is the beginning of another, and none comes again."""
        self._asked += 1
        return f"{self._own}-{self._asked}."

    def answer(self, request: GenerationRequest) -> AsyncIterator[GenerationOutput]:
        """One output where the request is not streamed."""
        opened = self._open[request.request_id] = _Open(self._name())
        return self._answer(request, opened)

    async def _answer(self, request: GenerationRequest, opened: _Open) -> AsyncIterator[GenerationOutput]:
        answer, body = Answer(request), generate_body(request, name=opened.name, context=self._context)
        try:
            async for reply in self._replies(request, body):
                output = answer.output(reply)
                if output.finish_reason is not None:
                    self._count_prompt(reply)
                yield output
        finally:
            opened.ended.set()
            del self._open[request.request_id]

    async def _replies(self, request: GenerationRequest, body: Mapping[str, Any]) -> AsyncIterator[Any]:
        if not request.stream:
            yield await self._client.post("/generate", body, seconds=None)
            return
        async for reply in self._client.events("/generate", body):
            yield reply

    def _count_prompt(self, reply: Mapping[str, Any]) -> None:
        told = reply["meta_info"]
        self.prefilled_tokens += told.get("prompt_tokens", 0) - told.get("cached_tokens", 0)

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Returns when they have ended."""
        await asyncio.gather(*(self._abort(self._open[name]) for name in request_ids if name in self._open))

    async def _abort(self, opened: _Open) -> None:
        while not opened.ended.is_set():
            await self._client.post("/abort_request", {"rid": opened.name})
            with suppress(TimeoutError):
                await asyncio.wait_for(opened.ended.wait(), AGAIN_SECONDS)

    async def logprob(self, before: Sequence[int], token: int, *, version: int, temperature: float) -> float:
        """By a request for one token."""
        body = logprob_body(before, token, version=version, temperature=temperature, name=self._name())
        reply = await self._client.post("/generate", body)
        ((logprob, *_),) = reply["meta_info"]["output_token_ids_logprobs"][0]
        return float(logprob)

    async def load(self, staged: StagedWeights, version: int) -> None:
        """SGLang reads the staged weights as what they are, a weight file."""
        with tempfile.TemporaryDirectory(prefix="headrace-sglang-weights-") as folder:
            (Path(folder) / "model.safetensors").symlink_to(staged.path)
            await self.load_file(folder, version)

    async def load_file(self, folder: str, version: int) -> None:
        """The weights in a Hugging Face-format directory. What this raises leaves SGLang with weights of which nobody
        knows what they are."""
        client = self._client
        await client.post("/pause_generation", {"mode": "abort"})
        asked = {"model_path": folder, "weight_version": str(version), "flush_cache": True}
        answer = await client.post("/update_weights_from_disk", asked)
        if not answer["success"]:
            raise EngineError(f"SGLang did not load version {version}: {answer['message']}", fix="see its log")
        await client.post("/continue_generation", {})
        reported = version_of((await client.get("/model_info"))["weight_version"])
        if reported != version:
            raise EngineError(
                f"SGLang was given version {version} and reports version {reported}",
                fix="let nothing but this adapter update the weights of an instance",
            )

    async def check(self) -> None:
        """One that is too busy to answer lives."""
        self._server.check()
        with suppress(TimeoutError):
            told = (await self._client.get("/v1/loads", seconds=LOOK_SECONDS))["loads"]
            self.running = sum(load["num_running_reqs"] for load in told)
            self.kv_used = max(load["token_usage"] for load in told)

    async def close(self) -> None:
        """A server that somebody else has started goes on."""
        await self._client.close()
        await self._server.close()
