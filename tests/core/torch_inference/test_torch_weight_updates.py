"""New policy versions reach a serving engine: complete and verified, or not at all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import xxhash

from headrace.contract.columns import Array
from headrace.contract.weights import TensorInfo, WeightManifest
from headrace.errors import EngineError
from headrace_torch.checkpoint import load_model

Tensors = dict[str, Array]


def read(path: str, *, dtype: Any = np.float32) -> Tensors:
    model = load_model(path, dtype=torch.float32, device="cpu")
    return {name: p.detach().numpy().astype(dtype) for name, p in model.named_parameters()}


def describe(tensors: Tensors, version: int) -> WeightManifest:
    infos = tuple(
        TensorInfo(
            name=name,
            dtype=t.dtype.name,
            shape=t.shape,
            checksum=xxhash.xxh3_128_hexdigest(np.ascontiguousarray(t).tobytes()),
        )
        for name, t in tensors.items()
    )
    return WeightManifest(
        version=version, tensors=infos, nbytes=sum(t.nbytes for t in tensors.values()), digest=f"digest-{version}"
    )


async def push(served: Any, tensors: Tensors, version: int) -> None:
    update = await served.engine.begin_update(describe(tensors, version))
    for name, tensor in tensors.items():
        await update.apply(name, tensor)
    await update.commit()


async def test_live_versions_decode_together_and_each_matches_its_own_model(
    make_model: Any, serve: Any, request_for: Any, prompts: Any, recompute: Any
) -> None:
    paths, given = [make_model(seed) for seed in (0, 1, 2)], prompts(18)
    async with serve(paths[0], slots=5, live_versions=3) as served:
        for version in (1, 2):
            await push(served, read(paths[version]), version)
        health = await served.engine.health()
        assert (health.versions, health.digests) == ((0, 1, 2), {1: "digest-1", 2: "digest-2"})
        answers = await served.generate(
            *(request_for(i, p, version=i % 3, seed=i, max_new_tokens=2 + i) for i, p in enumerate(given))
        )
    for i, prompt in enumerate(given):
        answer = answers[str(i)]
        expected = recompute(paths[i % 3], np.concatenate([prompt, answer.tokens]))[len(prompt) - 1 :]
        np.testing.assert_allclose(answer.logprobs, expected, atol=1e-5, rtol=0)
        assert [(s.version, s.start, s.stop) for s in answer.spans] == [(i % 3, 0, len(answer.tokens))]


async def test_requests_of_an_old_version_are_not_disturbed_by_an_update(
    make_model: Any, serve: Any, request_for: Any
) -> None:
    requests = [request_for(i, [1, i], seed=i, max_new_tokens=50) for i in range(8)]
    async with serve(make_model(0), slots=8) as served:
        undisturbed = await served.generate(*requests)
        await served.engine.submit(requests)
        await push(served, read(make_model(1)), 1)
        during = await served.finish([r.request_id for r in requests])
    assert all(during[i].logprobs == undisturbed[i].logprobs for i in undisturbed)


@pytest.mark.parametrize(
    ("sent", "served_as"), [("bfloat16", "bfloat16"), ("float32", "bfloat16"), ("bfloat16", "float32")]
)
async def test_weights_are_cast_to_the_engines_dtype(
    sent: str, served_as: str, make_model: Any, serve: Any, request_for: Any
) -> None:
    dtype = ml_dtypes.bfloat16 if sent == "bfloat16" else np.float32
    ask = {"prompt": [3, 4, 5], "seed": 1}
    async with serve(make_model(1), dtype=served_as) as served:
        await push(served, read(make_model(1), dtype=dtype), 1)
        answers = await served.generate(request_for("a", **ask), request_for("b", **ask, version=1))
    if served_as == "bfloat16":
        assert answers["a"].logprobs == answers["b"].logprobs
    else:
        np.testing.assert_allclose(answers["a"].logprobs[:1], answers["b"].logprobs[:1], atol=0.2)


NAME = "model.layers.1.mlp.up_proj.weight"


def corrupt(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    manifest = describe(tensors, 1)
    return {**tensors, NAME: tensors[NAME] + 1}, manifest


def zeroed(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    return {**tensors, NAME: np.zeros_like(tensors[NAME])}, describe(tensors, 1)


def dropped(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    return {n: t for n, t in tensors.items() if n != NAME}, describe(tensors, 1)


def misshapen(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    return {**tensors, NAME: tensors[NAME].T}, describe(tensors, 1)


def retyped(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    return {**tensors, NAME: tensors[NAME].astype(np.float16)}, describe(tensors, 1)


def unlisted(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    return tensors, describe({n: t for n, t in tensors.items() if n != NAME}, 1)


def foreign(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    more = {**tensors, "model.layers.9.mlp.up_proj.weight": tensors[NAME]}
    return more, describe(more, 1)


def other_model(tensors: Tensors) -> tuple[Tensors, WeightManifest]:
    changed = {**tensors, NAME: np.ascontiguousarray(tensors[NAME].T)}
    return changed, describe(changed, 1)


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (corrupt, "checksum"),
        (zeroed, "checksum"),
        (dropped, "never arrived"),
        (misshapen, "shape"),
        (retyped, "dtype float16"),
        (unlisted, "manifest lacks"),
        (foreign, "not a tensor of this model"),
        (other_model, "shape"),
    ],
)
async def test_an_update_with_a_flaw_is_refused_and_the_engine_serves_on(
    spoil: Callable[[Tensors], tuple[Tensors, WeightManifest]], told: str,
    make_model: Any, serve: Any, request_for: Any,
) -> None:  # fmt: skip
    async with serve(make_model(0)) as served:
        before = (await served.generate(request_for("a", [1])))["a"]
        tensors, manifest = spoil(read(make_model(1)))
        update = await served.engine.begin_update(manifest)
        for name, tensor in tensors.items():
            await update.apply(name, tensor)
        with pytest.raises(EngineError, match=told) as caught:
            await update.commit()
        assert "rollout-0" in caught.value.message
        assert "version 1" in caught.value.message
        assert "layers" in caught.value.message
        assert caught.value.fix
        assert (await served.engine.health()).versions == (0,)
        assert (await served.generate(request_for("a", [1])))["a"].logprobs == before.logprobs


async def test_a_tensor_applied_again_rightly_mends_the_update(make_model: Any, serve: Any, request_for: Any) -> None:
    tensors = read(make_model(1))
    async with serve(make_model(0)) as served:
        update = await served.engine.begin_update(describe(tensors, 1))
        for name, tensor in tensors.items():
            await update.apply(name, tensor + 1)
        with pytest.raises(EngineError):
            await update.commit()
        for name, tensor in tensors.items():
            await update.apply(name, tensor)
        await update.commit()
        assert (await served.engine.health()).versions == (0, 1)


async def test_a_replaced_or_aborted_update_cannot_be_committed(make_model: Any, serve: Any) -> None:
    tensors = read(make_model(1))
    async with serve(make_model(0)) as served:
        stale = await served.engine.begin_update(describe(tensors, 1))
        for name, tensor in tensors.items():
            await stale.apply(name, tensor)
        fresh = await served.engine.begin_update(describe(tensors, 1))
        await fresh.abort()
        await fresh.abort()
        for update in (stale, fresh):
            with pytest.raises(EngineError, match="aborted or replaced"):
                await update.commit()
        assert (await served.engine.health()).versions == (0,)


async def test_of_two_updates_to_one_version_the_first_to_commit_wins(
    make_model: Any, serve: Any, request_for: Any
) -> None:
    tensors = read(make_model(1))
    async with serve(make_model(0)) as served:
        first = await served.engine.begin_update(describe(tensors, 1))
        for name, tensor in tensors.items():
            await first.apply(name, tensor)
        second, _ = await asyncio.gather(served.engine.begin_update(describe(tensors, 1)), first.commit())
        await second.commit()
        assert (await served.engine.health()).versions == (0, 1)
        assert len((await served.generate(request_for("a", [1], version=1)))["a"].tokens) == 8


async def test_staged_tensors_are_copied_and_may_be_read_only(make_model: Any, serve: Any, request_for: Any) -> None:
    tensors = read(make_model(1))
    async with serve(make_model(0)) as served:
        update = await served.engine.begin_update(describe(tensors, 1))
        for name, tensor in tensors.items():
            buffer = tensor.copy()
            view = buffer[:]
            view.flags.writeable = False
            await update.apply(name, view)
            buffer[:] = np.nan
        await update.commit()
        assert len((await served.generate(request_for("a", [1], version=1)))["a"].tokens) == 8


async def test_live_versions_are_bounded_and_retiring_makes_room(make_model: Any, serve: Any, request_for: Any) -> None:
    tensors = read(make_model(1))
    async with serve(make_model(0), live_versions=2) as served:
        await push(served, tensors, 1)
        with pytest.raises(EngineError, match="live_versions = 2") as caught:
            await push(served, tensors, 2)
        assert "retire" in caught.value.fix
        await served.engine.retire(0)
        await served.engine.retire(0)
        await push(served, tensors, 2)
        health = await served.engine.health()
        assert (health.versions, sorted(health.digests)) == ((1, 2), [1, 2])
        with pytest.raises(EngineError, match="version 0"):
            await served.engine.submit([request_for("late", [1])])


async def test_an_engine_of_one_version_replaces_it_unless_it_is_in_use(
    make_model: Any, serve: Any, request_for: Any
) -> None:
    async with serve(make_model(0), live_versions=1) as served:
        await push(served, read(make_model(1)), 1)
        assert (await served.engine.health()).versions == (1,)
        await served.engine.submit([request_for("a", [1], version=1, max_new_tokens=60)])
        stage = await served.engine.begin_update(describe(read(make_model(2)), 2))
        for name, tensor in read(make_model(2)).items():
            await stage.apply(name, tensor)
        await served.engine.submit([request_for("b", [1], version=1, max_new_tokens=60)])
        with pytest.raises(EngineError, match=r"version 1 cannot be retired"):
            await stage.commit()
        await served.finish(["a", "b"])
        await stage.commit()
        assert (await served.engine.health()).versions == (2,)


async def test_a_version_in_use_cannot_be_retired(make_model: Any, serve: Any, request_for: Any) -> None:
    async with serve(make_model(0)) as served:
        await served.engine.submit([request_for("a", [1], max_new_tokens=60)])
        with pytest.raises(EngineError, match=r"version 0.*1 of its requests") as caught:
            await served.engine.retire(0)
        assert caught.value.fix
        assert (await served.finish(["a"]))["a"].reason == "length"
        await served.engine.retire(0)


async def test_weights_that_give_no_distribution_end_the_outputs_with_the_version_named(
    make_model: Any, serve: Any, request_for: Any
) -> None:
    tensors = {name: t * np.float32("nan") for name, t in read(make_model(1)).items()}
    async with serve(make_model(0)) as served:
        await push(served, tensors, 1)
        await served.engine.submit([request_for("a", [1], version=1)])
        with pytest.raises(EngineError, match="weights of version 1"):
            await served.finish(["a"])
