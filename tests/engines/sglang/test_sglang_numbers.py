"""What SGLang computes behind the adapter is what ``transformers`` computes, before and after weights arrive."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import GenerationRequest
from headrace.testing.suites.serving import Served, request
from headrace.testing.tensors import read_tensors, write_tensors
from headrace_sglang.attaching import KEY_VARIABLE
from headrace_sglang.client import Client
from support.reference_model import gap, reference
from support.sglang_served import started

pytestmark = [pytest.mark.engine, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

CLOSE = 2e-5
"""Nats; float32 on both sides."""
Models = Callable[[str], tuple[str, str]]
Address = Callable[[str], str]


def asked(name: str, *, length: int = 9, **changes: Any) -> GenerationRequest:
    prompt = np.random.default_rng(length).integers(3, 300, length).astype(np.int32)
    return request(name, prompt, **{"max_new_tokens": 24, "seed": 5, **changes})


async def worst(served: Served, path: str, version: int, **changes: Any) -> float:
    """Of several answers at once, against the model at ``path``."""
    requests = [asked(f"{version}-{n}", length=n, version=version, seed=n, **changes) for n in (1, 5, 140)]
    answers = await served.generate(*requests)
    temperature = changes.get("temperature", 1.0)
    return max(gap(path, r.prompt, a, temperature=temperature) for r, a in zip(requests, answers, strict=True))


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
async def test_log_probs_are_the_models_before_and_after_an_update(models: Models, address: Address, kind: str) -> None:
    first, second = models(kind)
    async with started(first, address=address(kind)) as served:
        assert await worst(served, first, 0) < CLOSE
        await served.push(read_tensors(second), 1)
        assert await worst(served, second, 1) < CLOSE
        assert await worst(served, first, 1) > 0.1


async def test_log_probs_are_those_at_the_sampling_temperature(models: Models, address: Address) -> None:
    path, _ = models("qwen3")
    async with started(path, address=address("qwen3")) as served:
        for temperature in (0.02, 0.7, 5.0):
            assert await worst(served, path, 0, temperature=temperature) < CLOSE / min(temperature, 1.0)
            assert await worst(served, path, 0, temperature=temperature, greedy=True) < CLOSE / min(temperature, 1.0)


async def test_nothing_stops_an_answer_but_its_own_stop_tokens(models: Models, address: Address) -> None:
    """The model's files say that token 2 ends a text; at this temperature it comes up in 900 draws."""
    path, _ = models("qwen3")
    async with started(path, address=address("qwen3")) as served:
        prompts = [asked(str(n), seed=n, temperature=50.0, max_new_tokens=150, stop_token_ids=(319,)) for n in range(6)]
        answers = await served.generate(*prompts)
    assert any(2 in answer.tokens for answer in answers)
    for answer in answers:
        assert answer.reason == ("stop" if answer.tokens[-1] == 319 else "length")
        assert 319 not in answer.tokens[:-1]


async def test_scores_of_given_tokens_are_what_sampling_them_would_have_told(models: Models, address: Address) -> None:
    path, _ = models("qwen3")
    tokens = asked("any", length=30).prompt
    async with started(path, address=address("qwen3")) as served:
        for temperature in (1.0, 0.7, 5.0):
            found = await served.engine.score(tokens, version=0, temperature=temperature)  # type: ignore[attr-defined]
            assert found.dtype == np.float32
            assert np.abs(found - reference(path, tokens, temperature=temperature)).max() < CLOSE
        assert (await served.engine.score(tokens[:1], version=0, temperature=1.0)).tolist() == [0.0]  # type: ignore[attr-defined]
        assert (await served.engine.health()).generated_tokens == 0


async def checksums(at: str, key: str) -> Any:
    """Of every tensor, as SGLang has it in its memory."""
    client = Client(at, key)
    try:
        told = await client.post("/weights_checker", {"action": "checksum"})
    finally:
        await client.close()
    assert told["success"], told
    return [rank["checksums"] for rank in told["ranks"]]


@pytest.mark.parametrize("kind", ["qwen3", "llama", "qwen3_moe"])
async def test_weights_that_come_back_answer_as_before_and_are_the_same_bytes(
    models: Models, address: Address, kind: str
) -> None:
    first, second = models(kind)
    at = address(kind)
    key = os.environ[KEY_VARIABLE]
    async with started(first, address=at) as served:
        (before,) = await served.generate(asked("before", greedy=True))
        had = await checksums(at, key)
        await served.push(read_tensors(second), 1)
        (between,) = await served.generate(asked("between", greedy=True, version=1))
        assert await checksums(at, key) != had
        await served.push(read_tensors(first), 2)
        (after,) = await served.generate(asked("after", greedy=True, version=2))
        assert await checksums(at, key) == had
    assert before.tokens == after.tokens != between.tokens
    assert before.logprobs == after.logprobs


async def test_keys_and_values_of_a_version_are_not_used_under_the_next(models: Models, address: Address) -> None:
    first, second = models("qwen3")
    async with started(first, address=address("qwen3")) as served:
        for name, path, version in (("once", first, 0), ("again", first, 0), ("next", second, 1)):
            if version:
                await served.push(read_tensors(second), version)
            prefilled = (await served.engine.health()).prefilled_tokens
            long = asked(name, length=200, version=version)
            (answer,) = await served.generate(long)
            assert gap(path, long.prompt, answer) < CLOSE
            computed = (await served.engine.health()).prefilled_tokens - prefilled
            assert (computed < 200) == (name == "again"), f"{name}: {computed} tokens were computed"


async def test_bfloat16_weights_arrive_in_a_float32_engine_as_they_are(models: Models, address: Address) -> None:
    path, rounded = models("llama")
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in read_tensors(path).items()}
    write_tensors(Path(rounded) / "model.safetensors", {n: t.astype(np.float32) for n, t in tensors.items()})
    async with started(path, address=address("llama")) as served:
        await served.push(tensors, 1)
        assert await worst(served, rounded, 1) < CLOSE
