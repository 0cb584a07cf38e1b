"""Cases D01-D03, E05, E06, G05, G08, L03 where they concern generation, on the real engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
import xxhash

from headrace.contract import (
    Array,
    GenerationOutput,
    GenerationRequest,
    InferenceContext,
    RequestState,
    Sampling,
    TensorInfo,
    WeightManifest,
)
from headrace.errors import EngineError
from headrace_torch.checkpoint import create_weights, save_model
from headrace_torch.decode.sampling import sample
from headrace_torch.decode.scheduler import Scheduler
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.model import Decoder, ModelConfig

Final: TypeAlias = dict[str, GenerationOutput]
Serve: TypeAlias = Callable[..., AbstractAsyncContextManager[TorchInferenceEngine]]

DEADLINE = 60.0
BIGRAMS = ((0.05, 0.9, 0.03, 0.02), (0.1, 0.05, 0.8, 0.05), (0.7, 0.1, 0.1, 0.1), (0.25, 0.25, 0.25, 0.25))
"""p(next | token) of case D03: p(1|0) = .9, p(2|1) = .8, p(0|2) = .7."""


def bigram_model(table: Sequence[Sequence[float]], *, positions: int = 64) -> Decoder:
    """A decoder that computes exactly ``table``: attention and MLP add nothing to one-hot embeddings, and the
    head holds the log-probs."""
    size = len(table)
    shape = {"hidden_size": size, "intermediate_size": size, "num_hidden_layers": 1, "head_dim": size}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    model = Decoder(
        ModelConfig(model_type="llama", vocab_size=size, max_position_embeddings=positions, **shape, **heads)
    )
    create_weights(model, 0)
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.model.layers[0].mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(100 * torch.eye(size))
        # the norm scales a one-hot vector to length sqrt(size)
        model.lm_head.weight.copy_(torch.tensor(table).log().T / size**0.5)
    return model


def random_model(seed: int, *, positions: int = 64) -> Decoder:
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
    model = Decoder(ModelConfig(model_type="llama", vocab_size=20, max_position_embeddings=positions, **shape, **heads))
    create_weights(model, seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 if parameter.ndim == 2 else 1)  # far from uniform distributions
    return model


@pytest.fixture
def serve(tmp_path: Path) -> Serve:
    @asynccontextmanager
    async def serving(model: Decoder, **settings: Any) -> AsyncIterator[TorchInferenceEngine]:
        save_model(model, str(tmp_path), like=None)
        engine = TorchInferenceEngine(TorchInferenceSettings(**settings))
        await engine.start(InferenceContext(name="rollout-0", model_path=str(tmp_path), version=0, threads=1))
        try:
            yield engine
        finally:
            await engine.close()

    return serving


def ask(name: object, prompt: Sequence[int] | Array, *, version: int = 0, **sampling: Any) -> GenerationRequest:
    return GenerationRequest(
        request_id=str(name), prompt=np.asarray(prompt, np.int32), sampling=Sampling(**sampling), version=version
    )


async def collect(engine: TorchInferenceEngine, count: int) -> Final:
    """The last outputs of ``count`` requests that do not stream."""
    final: Final = {}
    async with asyncio.timeout(DEADLINE):
        async for outputs in engine.outputs():
            final.update((o.request_id, o) for o in outputs)
            if len(final) == count:
                break
    return final


async def generate(engine: TorchInferenceEngine, *requests: GenerationRequest) -> Final:
    await engine.submit(requests)
    return await collect(engine, len(requests))


def manifest(tensors: dict[str, Array], version: int) -> WeightManifest:
    infos = [(n, t.dtype.name, t.shape, xxhash.xxh3_128_hexdigest(t.tobytes())) for n, t in tensors.items()]
    return WeightManifest(
        version=version,
        tensors=tuple(TensorInfo(name=n, dtype=d, shape=s, checksum=c) for n, d, s, c in infos),
        nbytes=sum(t.nbytes for t in tensors.values()),
        digest=str(version),
    )


def tensors_of(model: Decoder) -> dict[str, Array]:
    return {name: p.detach().numpy() for name, p in model.named_parameters()}


async def push(engine: TorchInferenceEngine, tensors: dict[str, Array], version: int) -> None:
    update = await engine.begin_update(manifest(tensors, version))
    for name, tensor in tensors.items():
        await update.apply(name, tensor)
    await update.commit()


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_D01_log_probs_are_those_of_the_whole_vocabulary(temperature: float, serve: Serve) -> None:
    assert {f.name for f in dataclasses.fields(Sampling)}.isdisjoint({"top_p", "top_k", "min_p"})
    async with serve(bigram_model([*BIGRAMS[:3], (0.4, 0.3, 0.2, 0.1)])) as engine:
        found = await generate(
            engine, *(ask(i, [3], max_new_tokens=1, seed=i, temperature=temperature) for i in range(200))
        )
    tempered = np.array((0.4, 0.3, 0.2, 0.1)) ** (1 / temperature)
    expected = np.log(tempered / tempered.sum())
    seen = {int(o.token_ids[0]): float(o.logprobs[0]) for o in found.values()}
    assert sorted(seen) == [0, 1, 2, 3]
    np.testing.assert_allclose([seen[i] for i in range(4)], expected, atol=1e-5)


def test_D02_the_log_prob_is_that_of_the_tempered_distribution() -> None:
    logits, u = torch.tensor([[2.0, 0.0]]), torch.zeros(1, dtype=torch.float64)
    for temperature, expected in ((torch.tensor([[0.5]]), -0.018150), (None, -0.126928)):
        tokens, logprobs = sample(logits, u=u, temperature=temperature, greedy=None)
        assert tokens.tolist() == [0]
        assert logprobs.item() == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize("temperature", [0.0, -1.0])
async def test_D02_the_engine_refuses_a_temperature_that_is_not_positive(temperature: float, serve: Serve) -> None:
    async with serve(bigram_model(BIGRAMS)) as engine:
        with pytest.raises(ValueError, match="temperature"):
            await engine.submit([ask("a", [0], max_new_tokens=1, temperature=temperature)])


async def test_D03_a_log_prob_is_that_of_its_own_token_given_those_before(serve: Serve) -> None:
    async with serve(bigram_model(BIGRAMS)) as engine:
        answer = (await generate(engine, ask("a", [0], max_new_tokens=3, greedy=True)))["a"]
    assert answer.token_ids.tolist() == [1, 2, 0]
    np.testing.assert_allclose(answer.logprobs, [-0.105361, -0.223144, -0.356675], atol=1e-5)


async def test_E05_the_budget_is_what_the_context_leaves(serve: Serve) -> None:
    async with serve(bigram_model(BIGRAMS, positions=256)) as engine:
        found = await generate(engine, *(ask(n, [3] * n, max_new_tokens=128) for n in (100, 200, 255, 256, 273)))
        lengths = {int(name): len(o.token_ids) for name, o in found.items()}
        assert lengths == {100: 128, 200: 56, 255: 1, 256: 0, 273: 0}
        assert {o.finish_reason for o in found.values()} == {"length"}
        assert all(len(o.logprobs) == len(o.token_ids) and (o.spans or not len(o.token_ids)) for o in found.values())
        assert len(await generate(engine, ask("after", [3], max_new_tokens=1))) == 1


def test_E06_an_aborted_answer_keeps_its_tokens_and_can_be_resumed() -> None:
    """3 of 8 are aborted at token 2, and one at the very moment it is complete."""
    scheduler = Scheduler(slots=8, max_length=64)
    scheduler.install(0, random_model(0))

    def run() -> Final:
        outputs: Final = {}
        while not scheduler.idle:
            outputs |= {o.request_id: o for o in scheduler.step()}
        return outputs

    requests = [RequestState.unbegun(ask(i, [i], max_new_tokens=2 if i == 7 else 20, greedy=True)) for i in range(8)]
    scheduler.submit(requests)
    whole = run()
    scheduler.submit(requests)
    found = {o.request_id: o for step in (scheduler.step(), scheduler.step()) for o in step}
    found |= {o.request_id: o for o in scheduler.abort(frozenset("0357"))}
    assert {i: (len(o.token_ids), o.finish_reason) for i, o in found.items()} == {
        "0": (2, "aborted"),
        "3": (2, "aborted"),
        "5": (2, "aborted"),
        "7": (2, "length"),
    }
    prefixes = {i: np.concatenate([[int(i)], found[i].token_ids]) for i in "035"}
    again = [ask(i, prefix, max_new_tokens=18, greedy=True) for i, prefix in prefixes.items()]
    scheduler.submit([RequestState.unbegun(request) for request in again])
    rest = run()
    assert sorted(rest) == list("0123456")
    for i, output in whole.items():
        parts = [o[i] for o in (found, rest) if i in o]
        assert [int(t) for o in parts for t in o.token_ids] == output.token_ids.tolist()
        assert all(len(o.token_ids) == len(o.logprobs) for o in parts)


async def test_G05_an_update_leaves_no_key_or_value_of_older_weights_in_use(serve: Serve) -> None:
    """The same prompt under a new version gives what an engine gives that never knew another version."""
    requests = [ask(i, [4, 5, 6, 7, i], max_new_tokens=20, seed=i) for i in range(6)]
    renewed = [dataclasses.replace(r, version=1) for r in requests]
    async with serve(random_model(1), slots=4) as engine:
        expected = await generate(engine, *requests)
    async with serve(random_model(0), slots=4) as engine:
        old = await generate(engine, *requests)
        await push(engine, tensors_of(random_model(1)), 1)
        both = await generate(
            engine, *renewed, *(dataclasses.replace(r, request_id=f"old {r.request_id}") for r in requests)
        )
    for i in map(str, range(6)):
        np.testing.assert_array_equal(both[i].token_ids, expected[i].token_ids)
        np.testing.assert_allclose(both[i].logprobs, expected[i].logprobs, atol=1e-5)
        np.testing.assert_array_equal(both[f"old {i}"].token_ids, old[i].token_ids)
        assert [s.version for s in both[i].spans] == [1]
        assert [s.version for s in both[f"old {i}"].spans] == [0]
    assert any(both[str(i)].token_ids.tolist() != old[str(i)].token_ids.tolist() for i in range(6))


async def test_G08_a_version_is_servable_only_after_a_complete_update(serve: Serve) -> None:
    tensors = tensors_of(random_model(1))
    last = list(tensors)[-1]
    async with serve(random_model(0)) as engine:
        update = await engine.begin_update(manifest(tensors, 1))
        for name, tensor in tensors.items():
            if name != last:
                await update.apply(name, tensor)
        with pytest.raises(EngineError, match=last):
            await update.commit()
        with pytest.raises(EngineError, match="version 1"):
            await engine.submit([ask("early", [1], max_new_tokens=1, version=1)])
        await update.apply(last, tensors[last])
        await update.commit()
        assert len(await generate(engine, ask("now", [1], max_new_tokens=1, version=1))) == 1


async def test_L03_an_answer_follows_its_seed_however_requests_are_split(serve: Serve) -> None:
    """4 samples each of 3 prompts: one engine at once, two engines, three chunks in reverse order."""

    def table(base: int) -> list[GenerationRequest]:
        pairs = [(p, s) for p in range(3) for s in range(4)]
        return [ask((p, s), [p], max_new_tokens=10, seed=base + 4 * p + s) for p, s in pairs]

    async def run(base: int, chunks: list[slice]) -> dict[str, list[int]]:
        answers: dict[str, list[int]] = {}
        for chunk in chunks:
            async with serve(random_model(0), slots=3) as engine:
                found = await generate(engine, *table(base)[chunk])
            answers |= {name: output.token_ids.tolist() for name, output in found.items()}
        return answers

    once = await run(100, [slice(0, 12)])
    assert once == await run(100, [slice(0, 12)])
    assert once == await run(100, [slice(0, 12, 2), slice(1, 12, 2)])
    assert once == await run(100, [slice(11, 7, -1), slice(7, 3, -1), slice(3, None, -1)])
    assert once != await run(900, [slice(0, 12)])
    for prompt in range(3):
        assert len({tuple(once[str((prompt, s))]) for s in range(4)}) == 4
