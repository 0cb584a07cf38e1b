"""What vLLM computes behind the adapter is what ``transformers`` computes, before and after weights arrive."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from headrace.contract import GenerationRequest
from headrace.testing.suites.serving import Served, request
from headrace.testing.tensors import read_tensors, write_tensors
from support.reference_model import gap, reference, write_model
from support.vllm_served import started

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

CLOSE = 2e-5
"""Nats; float32 on both sides. Seen: 5e-6."""
KINDS: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": False},
    "llama": {"tie_word_embeddings": True},
    "qwen3_moe": {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64},
}


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, str]:
    """Two models of one kind."""
    first, second = (
        write_model(tmp_path / name, request.param, seed=n, **KINDS[request.param]) for n, name in enumerate("ab")
    )
    return first, second


def asked(name: str, *, length: int = 9, **changes: Any) -> GenerationRequest:
    prompt = np.random.default_rng(length).integers(3, 300, length).astype(np.int32)
    return request(name, prompt, **{"max_new_tokens": 24, "seed": 5, **changes})


async def worst(served: Served, path: str, version: int, **changes: Any) -> float:
    """Of several answers at once, against the model at ``path``."""
    requests = [asked(f"{version}-{n}", length=n, version=version, seed=n, **changes) for n in (1, 5, 140)]
    answers = await served.generate(*requests)
    temperature = changes.get("temperature", 1.0)
    return max(gap(path, r.prompt, a, temperature=temperature) for r, a in zip(requests, answers, strict=True))


async def test_log_probs_are_the_models_before_and_after_an_update(pair: tuple[str, str]) -> None:
    first, second = pair
    async with started(first) as served:
        assert await worst(served, first, 0) < CLOSE
        await served.push(read_tensors(second), 1)
        assert await worst(served, second, 1) < CLOSE
        assert await worst(served, first, 1) > 0.1


async def test_log_probs_are_those_at_the_sampling_temperature(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen3", seed=0)
    async with started(path) as served:
        for temperature in (0.02, 0.7, 5.0):
            assert await worst(served, path, 0, temperature=temperature) < CLOSE / min(temperature, 1.0)
            assert await worst(served, path, 0, temperature=temperature, greedy=True) < CLOSE / min(temperature, 1.0)


async def test_scores_of_given_tokens_are_what_sampling_them_would_have_told(tmp_path: Path) -> None:
    path = write_model(tmp_path / "model", "qwen3", seed=0)
    tokens = asked("any", length=30).prompt
    async with started(path) as served:
        for temperature in (1.0, 0.7, 5.0):
            found = await served.engine.score(tokens, version=0, temperature=temperature)  # type: ignore[attr-defined]
            assert found.dtype == np.float32
            assert np.abs(found - reference(path, tokens, temperature=temperature)).max() < CLOSE
        assert (await served.engine.score(tokens[:1], version=0, temperature=1.0)).tolist() == [0.0]  # type: ignore[attr-defined]
        assert (await served.engine.health()).generated_tokens == 0


async def test_weights_that_come_back_have_the_same_checksums_and_answer_as_before(pair: tuple[str, str]) -> None:
    answers, digests = [], []
    async with started(pair[0]) as served:
        for version, path in enumerate((pair[0], pair[1], pair[0]), start=1):
            await served.push(read_tensors(path), version)
            answers += await served.generate(asked(f"{version}", greedy=True, version=version))
            digests.append((await served.engine.health()).digests[version])
    first, between, again = answers
    assert first.tokens == again.tokens != between.tokens
    assert first.logprobs == again.logprobs
    assert digests[0] == digests[2] != digests[1]


async def test_keys_and_values_of_a_version_are_not_used_under_the_next(tmp_path: Path) -> None:
    """A prompt of more than one block, so that vLLM keeps its keys and values."""
    first, second = (write_model(tmp_path / name, "qwen3", seed=n) for n, name in enumerate("ab"))
    async with started(first) as served:
        for name, path, version in (("once", first, 0), ("again", first, 0), ("next", second, 1)):
            if version:
                await served.push(read_tensors(second), version)
            prefilled = (await served.engine.health()).prefilled_tokens
            long = asked(name, length=200, version=version)
            (answer,) = await served.generate(long)
            assert gap(path, long.prompt, answer) < CLOSE
            computed = (await served.engine.health()).prefilled_tokens - prefilled
            assert (computed < 200) == (name == "again"), f"{name}: {computed} tokens were computed"


async def test_bfloat16_weights_arrive_in_a_float32_engine_as_they_are(tmp_path: Path) -> None:
    path, rounded = (write_model(tmp_path / name, "llama", seed=0, tie_word_embeddings=True) for name in "ab")
    tensors = {name: tensor.astype(ml_dtypes.bfloat16) for name, tensor in read_tensors(path).items()}
    write_tensors(Path(rounded) / "model.safetensors", {n: t.astype(np.float32) for n, t in tensors.items()})
    async with started(path) as served:
        await served.push(tensors, 1)
        assert await worst(served, rounded, 1) < CLOSE


async def test_a_bfloat16_engine_differs_by_its_rounding_alone(tmp_path: Path) -> None:
    first, second = (write_model(tmp_path / name, "qwen3", seed=n) for n, name in enumerate("ab"))
    async with started(first, dtype="bfloat16") as served:
        await served.push(read_tensors(second), 1)
        assert 1e-4 < await worst(served, second, 1) < 0.5
