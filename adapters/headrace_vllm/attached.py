"""A vLLM server that somebody else started (``vllm serve``), in the words of :mod:`headrace_vllm.core`.

Token ids go in and come out by vLLM's endpoint for them, weights by those that it has for reinforcement learning. Of
the server's weights there is one owner: of two instances, also of two jobs on one machine, the second is refused.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace.errors import EngineError
from headrace_vllm.replies import Reply, read_reply
from headrace_vllm.server import Server, Wanted
from headrace_vllm.stats import LatestStats

ABORT_SECONDS = 0.05
"""Between two times that a server is asked to abort: it knows nothing of a request that is on its way to it."""
SIZES = (
    "model_type",
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
)
"""Of a model's configuration: by them tensors have their shapes."""
_PREFIX = "generate-tokens-"
"""What vLLM's endpoint puts before the names that requests have inside."""


class Replies:
    """Those to one request, in the order in which they come."""

    def __init__(self, incoming: AsyncIterator[bytes]) -> None:
        self._arrived: asyncio.Queue[Reply | Exception] = asyncio.Queue()
        self.listening = asyncio.ensure_future(self._listen(incoming))

    async def _listen(self, incoming: AsyncIterator[bytes]) -> None:
        try:
            async for text in incoming:
                reply = read_reply(text)
                self._arrived.put_nowait(reply)
                if reply.finished:
                    return
            raise EngineError("a vLLM server ended an answer in its middle", fix="see the server's log")
        except Exception as error:  # whatever a connection may raise is for who awaits the reply
            self._arrived.put_nowait(error)

    def get_nowait(self) -> Reply | None:
        """None when there is none."""
        return None if self._arrived.empty() else _reply(self._arrived.get_nowait())

    async def get(self) -> Reply:
        """The next."""
        return _reply(await self._arrived.get())

    def close(self) -> None:
        """No more are awaited; vLLM ends a request whose connection is closed."""
        self.listening.cancel()


def _reply(arrived: Reply | Exception) -> Reply:
    if isinstance(arrived, Exception):
        raise arrived
    return arrived


class AttachedVllm:
    """One server, from :meth:`attach` to :meth:`close`."""

    tells_versions = True

    def __init__(self, server: Server, owned: socket.socket, stats: LatestStats) -> None:
        self._server = server
        self._owned = owned
        self._stats = stats
        self._open: dict[str, Replies] = {}

    async def add(
        self, name: str, token_ids: Sequence[int], salt: str, arguments: Mapping[str, Any], *, stream: bool
    ) -> Replies:
        """Its replies. Requests that are added at the same time may overtake one another."""
        body = {
            "request_id": name,
            "token_ids": list(token_ids),
            "cache_salt": salt,
            "sampling_params": {**arguments, "flat_logprobs": False},
            "stream": stream,
        }
        replies = self._open[name] = Replies(self._server.replies("/inference/v1/generate", body))
        replies.listening.add_done_callback(lambda _: self._open.pop(name, None))
        return replies

    async def abort(self, names: Sequence[str]) -> None:
        """Until each has ended, or its connection is closed."""
        while waiting := {name: self._open[name].listening for name in names if name in self._open}:
            await self._server.post("/abort_requests", {"request_ids": [_PREFIX + name for name in waiting]})
            await asyncio.wait(waiting.values(), timeout=ABORT_SECONDS)

    async def weight_version(self) -> str:
        """The label of the weights."""
        return str((await self._server.get("/weight_info"))["weight_version"])

    async def label(self, version: str) -> None:
        """Give the weights a label."""
        await self._server.post("/update_weight_version", {"new_version": version})

    async def load(self, info: Mapping[str, Any]) -> None:
        """One session of vLLM's weight transfer."""
        await self._server.post("/start_weight_update")
        await self._server.post("/update_weights", {"update_info": dict(info)})
        await self._server.post("/finish_weight_update", {})

    async def pause(self) -> None:
        """No step is taken any more."""
        await self._server.post("/pause?mode=keep&clear_cache=true")

    async def resume(self) -> None:
        """Steps are taken again, on keys and values of requests of now alone."""
        await self._server.post("/resume")
        await self._server.post("/reset_prefix_cache")

    async def check(self) -> None:
        """EngineError when it does not answer, or says that its engine is dead. Takes its numbers along."""
        await self._server.get_text("/health")
        self._stats.read(await self._server.get_text("/metrics"))

    async def close(self) -> None:
        """The server goes on, without requests of ours."""
        for replies in list(self._open.values()):
            replies.close()
        await self._server.close()
        self._owned.close()


async def attach(addresses: Sequence[str], model_path: str, wanted: Wanted, stats: LatestStats) -> AttachedVllm:
    """The first server of ``addresses`` that nobody on this machine is attached to. EngineError when there is none, or
    it cannot do what is needed, such as take up weights of the model at ``model_path``."""
    for address in addresses:
        owned = _own(address)
        if owned is not None:
            break
    else:
        raise EngineError(
            f"each vLLM server of {', '.join(addresses)} has an instance attached to it already",
            fix="give an address for each instance, of a server that no other job uses",
        )
    server = Server(address)
    try:
        await server.examine(wanted)
        await _require_same_memory(server)
        await _require_same_model(server, model_path)
        await server.post("/abort_requests", {})  # those of an instance that was killed
        await server.post("/resume")
        return AttachedVllm(server, owned, stats)
    except BaseException:  # cancelled too: others may have the server; raised again
        owned.close()
        await server.close()
        raise


async def _require_same_memory(server: Server) -> None:
    """EngineError when the server's workers cannot read memory that this process shares: weights go that way."""
    secret = secrets.token_bytes(8)
    file = os.memfd_create("headrace greeting")
    try:
        os.write(file, secret)
        call = {"method": "headrace_read", "args": [f"/proc/{os.getpid()}/fd/{file}"]}
        read = json.loads(await server.post("/collective_rpc", call))["results"]
    except EngineError as error:
        raise EngineError(
            f"the workers of the vLLM server at {server.address} cannot read memory of this process, by which weights "
            f"go to them: {error.message}",
            fix="have the server run on the machine of its rollout node, under the same user and in the same container",
        ) from error
    finally:
        os.close(file)
    if any(bytes(each) != secret for each in read):
        raise EngineError(
            f"the workers of the vLLM server at {server.address} read {read} where this process wrote {secret!r}",
            fix="have the server run on the machine of its rollout node",
        )


async def _require_same_model(server: Server, model_path: str) -> None:
    """EngineError when weights of the model at ``model_path`` would not fit the server's model: vLLM breaks of them."""
    own = _sizes(json.loads((Path(model_path) / "config.json").read_text()))
    for config in json.loads(await server.post("/collective_rpc", {"method": "headrace_model"}))["results"]:
        its = _sizes(config)
        if differing := [f"{name} {its[name]} and {own[name]}" for name in SIZES if own[name] != its[name]]:
            raise EngineError(
                f"the vLLM server at {server.address} has another model than the one at {model_path}: "
                f"{', '.join(differing)}",
                fix="start it with the job's model",
            )


def _sizes(config: Mapping[str, Any]) -> dict[str, Any]:
    text = config.get("text_config") or config
    return {name: text.get(name) for name in SIZES}


def _own(address: str) -> socket.socket | None:
    """Held as long as it is open, at most as long as this process lives. None when another one holds it."""
    owned = socket.socket(socket.AF_UNIX)
    try:
        owned.bind(f"\0headrace vllm {address.rstrip('/')}")  # a name without a file: it goes when the process does
    except OSError:
        owned.close()
        return None
    return owned
