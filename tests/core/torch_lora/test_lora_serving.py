"""What an engine serves of a base and an adapter is what the trainer computes, and a base arrives once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array, Batch, InferenceContext, WeightManifest
from headrace.contract.adapters import adapter_names, is_adapter
from headrace.contract.columns import TOKENS
from headrace.errors import EngineError
from headrace.testing.suites.serving import manifest_of
from headrace.testing.tensors import read_tensors
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.training import LoraSettings
from support.lora import LORA, read, rows, scored, train

QUERY = "model.layers.1.self_attn.q_proj.weight"


class Served:
    """An engine that takes versions as a rollout node has it take them."""

    def __init__(self, model: str, **settings: Any) -> None:
        self.engine = TorchInferenceEngine(TorchInferenceSettings(**settings))
        self._model = model

    async def __aenter__(self) -> Served:
        await self.engine.start(InferenceContext(name="rollout-0", model_path=self._model, version=-1, threads=1))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.engine.close()

    async def load(self, tensors: dict[str, Array], version: int) -> list[str]:
        """The names of what was applied."""
        manifest = manifest_of(tensors, version)
        update = await self.engine.begin_update(manifest)
        wanted = [name for name in tensors if update.wants(name)]
        for name in wanted:
            await update.apply(name, tensors[name])
        await update.commit()
        assert (await self.engine.health()).digests[version] == manifest.digest
        return wanted

    async def logprobs(self, batch: Batch, *, version: int = 0) -> Array:
        found = [await self.engine.score(row, version=version, temperature=1.0) for row in batch.ragged(TOKENS)]
        return np.concatenate(found)


async def served(model: str, tensors: dict[str, Array], batch: Batch, **settings: Any) -> Array:
    async with Served(model, **settings) as one:
        await one.load(tensors, 0)
        return await one.logprobs(batch)


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
@pytest.mark.parametrize("targets", [LORA.targets, ("k_proj", "up_proj"), ("v_proj", "o_proj", "gate_proj")])
def test_trainer_and_engine_have_the_same_log_probs(
    architecture: str, targets: Any, trainer: Any, models: Callable[..., str]
) -> None:
    path = models(architecture)
    engine = trainer(LoraSettings(rank=4, targets=targets), path=path)
    train(engine, steps=3)
    found = asyncio.run(served(path, read(engine.weight_source()), rows()))
    assert np.abs(found - scored(engine, rows())).max() < 1e-3
    assert np.abs(found - scored(trainer(None, path=path), rows())).mean() > 0.05, "the adapter does something"


def test_in_bfloat16_they_agree_better_than_with_a_merged_model(trainer: Any, model: str, tmp_path: Path) -> None:
    engine = trainer(dtype="bfloat16")
    train(engine, steps=3)
    engine.save(str(tmp_path / "export"), kind="export")
    batch, expected = rows(count=20), scored(engine, rows(count=20))
    found = asyncio.run(served(model, read(engine.weight_source()), batch, dtype="bfloat16"))
    merged = asyncio.run(served(model, read_tensors(tmp_path / "export"), batch, dtype="bfloat16"))
    assert np.abs(found - expected).mean() < np.abs(merged - expected).mean()


async def test_a_base_is_wanted_once_and_lies_in_memory_once(trainer: Any, model: str) -> None:
    engine, expected = trainer(), {}
    async with Served(model) as one:
        first = read(engine.weight_source())
        assert await one.load(first, 0) == list(first)
        expected[0] = scored(engine, rows())
        for version in (1, 2):
            train(engine)
            expected[version] = scored(engine, rows())
            tensors = read(engine.weight_source())
            assert await one.load(tensors, version) == [name for name in tensors if is_adapter(name)]
        for version, logprobs in expected.items():
            found = await one.logprobs(rows(), version=version)
            assert np.abs(found - logprobs).max() < 1e-3
        batches = await one.engine._ask(lambda scheduler: dict(scheduler._batches))
        assert len({batches[version].model.embedding.data_ptr() for version in (0, 1, 2)}) == 1


async def test_another_base_is_wanted_whole_and_versions_of_the_one_before_go_on(trainer: Any, model: str) -> None:
    engine = trainer()
    train(engine)
    async with Served(model, live_versions=5) as one:
        await one.load(read(engine.weight_source()), 0)
        tensors = read(engine.weight_source())
        tensors["model.norm.weight"] = 1.5 * tensors["model.norm.weight"]
        assert await one.load(tensors, 1) == list(tensors)
        train(engine)
        back = read(engine.weight_source())
        assert await one.load(back, 2) == list(back), "the base that came last is kept, and no other"
        assert np.abs(await one.logprobs(rows(), version=2) - scored(engine, rows())).max() < 1e-3
        plain = {name: tensor for name, tensor in back.items() if not is_adapter(name)}
        assert await one.load(plain, 3) == list(plain), "a version without an adapter is a model of its own"


async def test_an_engine_with_one_live_version_keeps_its_base(trainer: Any, model: str) -> None:
    engine = trainer()
    async with Served(model, live_versions=1) as one:
        await one.load(read(engine.weight_source()), 0)
        train(engine)
        tensors = read(engine.weight_source())
        assert all(map(is_adapter, await one.load(tensors, 1)))
        assert (await one.engine.health()).versions == (1,)
        assert np.abs(await one.logprobs(rows(), version=1) - scored(engine, rows())).max() < 1e-3


A, B = adapter_names(QUERY)


@pytest.mark.parametrize("kept", [False, True], ids=["first version", "base kept"])
@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: {n: a for n, a in t.items() if n != B}, f"the manifest lacks {B}"),
        (lambda t: {n: a for n, a in t.items() if n != A}, f"the model has no {B}"),
        (lambda t: {**t, B: t[B][:, :-1]}, rf"{B}: shape \(64, 3\), .*model \(64, 4\)"),
        (lambda t: {**t, A: t[A][:, :-1]}, rf"{A}: shape \(4, 63\), .*model \(4, 64\)"),
        (lambda t: {**t, "model.norm.lora_A.weight": t[A]}, r"the model has no model\.norm\.lora_A\.weight"),
        (lambda t: {**t, A: t[A].ravel()}, rf"{A}: shape \(256,\)"),
    ],
)
async def test_an_adapter_that_does_not_fit_is_not_served(
    spoil: Any, message: str, kept: bool, trainer: Any, model: str
) -> None:
    tensors = read(trainer().weight_source())
    async with Served(model) as one:
        if kept:
            await one.load(tensors, 0)
        before = (await one.engine.health()).versions
        with pytest.raises(EngineError, match=message):
            await one.load(spoil(tensors), 1)
        assert (await one.engine.health()).versions == before


async def test_an_adapter_of_the_wrong_bytes_is_not_served(trainer: Any, model: str) -> None:
    tensors = read(trainer().weight_source())
    async with Served(model) as one:
        await one.load(tensors, 0)
        manifest: WeightManifest = manifest_of(tensors, 1)
        update = await one.engine.begin_update(manifest)
        for name in filter(update.wants, tensors):
            await update.apply(name, tensors[name] + (name == A))
        with pytest.raises(EngineError, match=rf"{A}: checksum"):
            await update.commit()
        await update.apply(A, tensors[A])
        await update.commit()
        assert 1 in (await one.engine.health()).versions
