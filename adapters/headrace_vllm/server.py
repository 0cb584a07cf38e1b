"""A vLLM server by its HTTP endpoints, and what it must be for the adapter.

A server is asked what it has, before anything is served: endpoints, and the settings that decide what its log-probs
mean and whether weights can reach it.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any

from headrace.errors import EngineError, PluginError
from headrace_vllm.names import BACKEND, EXTENSION, TEMPERING

CONNECT_SECONDS = 10.0
ENDPOINTS = (
    "/abort_requests",
    "/collective_rpc",
    "/finish_weight_update",
    "/health",
    "/inference/v1/generate",
    "/pause",
    "/reset_prefix_cache",
    "/resume",
    "/server_info",
    "/start_weight_update",
    "/update_weight_version",
    "/update_weights",
    "/weight_info",
)
ARGUMENTS = (
    *("--enable-scale-out", "--skip-tokenizer-init"),
    *("--generation-config", "vllm"),
    *("--logprobs-mode", "processed_logprobs"),
    *("--logits-processors", TEMPERING),
    *("--worker-extension-cls", EXTENSION),
    *("--weight-transfer-config", json.dumps({"backend": BACKEND})),
)
"""Of a server as it must be, besides what settings say."""
COMMAND = f"VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --host 127.0.0.1 {shlex.join(ARGUMENTS)}"
"""That starts a server as it must be."""


class Server:
    """Its endpoints. EngineError, with the server's own words, for what is not answered by success."""

    def __init__(self, address: str) -> None:
        try:
            import aiohttp
        except ImportError as error:
            raise PluginError(
                "inference_engine 'vllm' needs aiohttp to reach a server by its address",
                fix="pip install aiohttp, or give an interpreter that has vLLM, which comes with it",
            ) from error
        self.address = address.rstrip("/")
        self._errors: Any = (aiohttp.ClientError, OSError)
        key = os.environ.get("VLLM_API_KEY")
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {key}"} if key else {},
            timeout=aiohttp.ClientTimeout(total=None, connect=CONNECT_SECONDS),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def get(self, path: str) -> Any:
        """What the JSON says."""
        return json.loads(await self.get_text(path))

    async def get_text(self, path: str) -> str:
        """The answer as it is."""
        return (await self._asked("GET", path)).decode()

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        """The answer as it is."""
        return await self._asked("POST", path, body)

    async def replies(self, path: str, body: Mapping[str, Any]) -> AsyncIterator[bytes]:
        """The JSON of each answer: one, or with ``stream`` one for each event (server-sent events)."""
        if not body.get("stream"):
            yield await self._asked("POST", path, body)
            return
        async with self._answer("POST", path, body) as response:
            async for line in response.content:
                text = line.strip().removeprefix(b"data: ")
                if text and text != b"[DONE]":
                    yield text

    async def _asked(self, method: str, path: str, body: Mapping[str, Any] | None = None) -> bytes:
        async with self._answer(method, path, body) as response:
            return bytes(await response.read())

    @asynccontextmanager
    async def _answer(self, method: str, path: str, body: Mapping[str, Any] | None) -> AsyncIterator[Any]:
        url = self.address + path
        try:
            async with self._session.request(method, url, json=body) as response:
                if response.status != HTTPStatus.OK:
                    text = (await response.text())[:300]
                    raise EngineError(
                        f"the vLLM server answered {method} {url} by status {response.status}: {text}",
                        fix="see the server's log",
                    )
                yield response
        except self._errors as error:
            raise EngineError(
                f"the vLLM server at {self.address} is not reached: {error!r}", fix=f"start one with: {COMMAND}"
            ) from error

    async def close(self) -> None:
        """Open requests are broken off."""
        await self._session.close()

    # ------------------------------------------------------------ what it is

    async def examine(self, wanted: Wanted) -> None:
        """EngineError when it cannot serve as ``wanted``."""
        described = await self.get("/openapi.json")
        missing = [path for path in ENDPOINTS if path not in described["paths"]]
        if missing:
            raise self._unfit(f"it has no endpoint {', '.join(missing)}")
        if "weight_versions" not in json.dumps(described["components"]):
            raise self._unfit("it does not tell with its answers which weights sampled them, as vLLM does from 0.32 on")
        config = (await self.get("/server_info?config_format=json"))["vllm_config"]
        if wrong := wanted.lacking(config):
            raise self._unfit("; ".join(wrong))

    def _unfit(self, why: str) -> EngineError:
        return EngineError(
            f"the vLLM server at {self.address} cannot be used: {why}",
            fix=f"start it on this machine, in an environment that has headrace, with: {COMMAND}",
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What a server must say of itself."""

    slots: int
    context: int
    """Tokens of the longest sequence."""
    dtype: str

    def lacking(self, config: Mapping[str, Any]) -> list[str]:
        """What it lacks. ``config``: a ``VllmConfig`` as JSON."""
        model, transfer = config["model_config"], config.get("weight_transfer_config") or {}
        equal = {
            "--logprobs-mode": (model["logprobs_mode"], "processed_logprobs"),
            "--dtype": (str(model["dtype"]).removeprefix("torch."), self.dtype),
            "--worker-extension-cls": (config["parallel_config"]["worker_extension_cls"], EXTENSION),
            "--weight-transfer-config": (transfer.get("backend"), BACKEND),
        }
        at_least = {
            "--max-model-len": (model["max_model_len"], self.context),
            "--max-num-seqs": (config["scheduler_config"]["max_num_seqs"], self.slots),
        }
        wrong = [f"{name} is {has!r} and must be {must!r}" for name, (has, must) in equal.items() if has != must]
        wrong += [
            f"{name} is {has} and must be {must} at least" for name, (has, must) in at_least.items() if has < must
        ]
        if TEMPERING not in map(str, model.get("logits_processors") or ()):
            wrong.append(f"--logits-processors must have {TEMPERING!r}")
        return wrong
