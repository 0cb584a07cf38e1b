"""Servers of SGLang that the tests of a folder share: each takes half a minute to start."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from headrace_sglang.attaching import KEY_VARIABLE
from support.reference_model import write_model
from support.sglang_served import running_server

KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False, "eos_token_id": 2},
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.fixture
def models(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    """Two models of one kind."""

    def written(kind: str) -> tuple[str, str]:
        first, second = (write_model(tmp_path / name, kind, seed=n, **KINDS[kind]) for n, name in enumerate("ab"))
        return first, second

    return written


@pytest.fixture(scope="session")
def _servers() -> Iterator[tuple[ExitStack, dict[str, tuple[str, str]]]]:
    with ExitStack() as stack:
        yield stack, {}


@pytest.fixture
def address(
    _servers: tuple[ExitStack, dict[str, tuple[str, str]]],
    tmp_path_factory: pytest.TempPathFactory,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[str], str]:
    """Of a server that serves models of this kind; whoever attaches to it gives it the weights of its own."""
    stack, running = _servers

    def at(kind: str) -> str:
        if kind not in running:
            path = write_model(tmp_path_factory.mktemp(kind), kind, seed=9, **KINDS[kind])
            server = stack.enter_context(running_server(path))
            running[kind] = server.address, server.key
        found, key = running[kind]
        monkeypatch.setenv(KEY_VARIABLE, key)
        return found

    return at
