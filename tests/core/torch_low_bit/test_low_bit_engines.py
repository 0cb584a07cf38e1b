"""Trainer and engine of a quantised job: the same low-bit weights on both sides, and the same log-probs of them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import (
    Array,
    Batch,
    InferenceContext,
    LossInputs,
    LossOutput,
    LossSpec,
    Quantization,
    Ragged,
    TensorInfo,
    TrainingContext,
    WeightManifest,
)
from headrace.contract.columns import LOSS_MASK, LOSS_WEIGHTS, TOKENS
from headrace.errors import EngineError
from headrace.services.low_bit import LowBitSource
from headrace.testing.tensors import read_tensors, write_tensors
from headrace.wire import manifest_digest, tensor_info
from headrace_quantization.schemes import W4A8, Fp8E4M3, W4A16Int4, W8A8Int8
from headrace_torch.inference import TorchInferenceEngine, TorchInferenceSettings
from headrace_torch.training import TorchTrainingEngine, TorchTrainingSettings

SCHEMES = {
    "w8a8_int8": W8A8Int8(W8A8Int8.Settings()),
    "w4a16_int4": W4A16Int4(W4A16Int4.Settings()),
    "w4a8": W4A8(W4A8.Settings()),
    "fp8_e4m3": Fp8E4M3(Fp8E4M3.Settings()),
    "fp8_e4m3 in squares": Fp8E4M3(Fp8E4M3.Settings(blocks="square")),
}
SCRATCH = {
    "architecture": "llama",
    "alphabet": "0123456789abcdefghijklmnop=",
    "hidden_size": 64,
    "layers": 2,
    "heads": 4,
    "kv_heads": 2,
    "intermediate_size": 96,
    "max_length": 128,
}
LOSS = LossSpec(function=f"{__name__}:likelihood", temperature=1.0)


def likelihood(inputs: LossInputs) -> LossOutput:
    return LossOutput(numerator=-(inputs.weights * inputs.logprobs).sum())


@pytest.fixture(params=SCHEMES.values(), ids=SCHEMES.keys())
def scheme(request: pytest.FixtureRequest) -> Quantization:
    found: Quantization = request.param
    return found


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model whose distributions are far from uniform."""
    path = tmp_path_factory.mktemp("model")
    TorchTrainingEngine.create_model(str(path), settings=SCRATCH, seed=7)
    tensors = {name: 6 * t if t.ndim == 2 else t for name, t in read_tensors(path).items()}
    write_tensors(path / "model.safetensors", tensors)
    return str(path)


@pytest.fixture
def trainer(model: str) -> Iterator[Callable[..., TorchTrainingEngine]]:
    """A started training engine: ``trainer(scheme, **settings)``, aligned to the scheme unless that is None."""
    started: list[TorchTrainingEngine] = []

    def start(scheme: Quantization | None, **settings: Any) -> TorchTrainingEngine:
        engine = TorchTrainingEngine(TorchTrainingSettings(**{"learning_rate": 1e-2, **settings}))
        context = TrainingContext(
            name="trainer", model_path=model, seed=5, threads=1, total_steps=10, quantization=scheme
        )
        engine.start(context)
        started.append(engine)
        return engine

    yield start
    for each in started:
        each.close()


def rows(*, seed: int = 0, count: int = 6) -> Batch:
    generator = np.random.default_rng(seed)
    ids = Ragged.from_arrays(
        [generator.integers(3, 28, n).astype(np.int32) for n in generator.integers(8, 30, count)], dtype=np.int32
    )
    mask = Ragged.from_arrays([np.arange(len(row)) >= 1 for row in ids], dtype=np.bool_)
    weights = ids.like(mask.values.astype(np.float32))
    return Batch(rows=np.arange(count), columns={TOKENS: ids, LOSS_MASK: mask, LOSS_WEIGHTS: weights})


def train(engine: TorchTrainingEngine, *, steps: int = 1) -> None:
    for seed in range(steps):
        step = engine.begin_step(LOSS)
        step.accumulate(rows(seed=seed))
        assert step.finish(denominator=100.0).applied


def published(source: Any, version: int) -> tuple[WeightManifest, dict[str, Array]]:
    tensors = {name: np.array(tensor) for name, tensor in source.tensors()}
    infos: tuple[TensorInfo, ...] = tuple(tensor_info(name, tensor) for name, tensor in tensors.items())
    nbytes = sum(tensor.nbytes for tensor in tensors.values())
    manifest = WeightManifest(version=version, tensors=infos, nbytes=nbytes, digest=manifest_digest(infos))
    return manifest, tensors


async def served(model: str, scheme: Quantization | None, source: Any, batch: Batch, **settings: Any) -> list[Array]:
    """What an engine that got the source's weights by an update says of the batch's tokens."""
    engine = TorchInferenceEngine(TorchInferenceSettings(**settings))
    await engine.start(InferenceContext(name="rollout-0", model_path=model, version=-1, threads=1, quantization=scheme))
    try:
        manifest, tensors = published(source, 0)
        update = await engine.begin_update(manifest)
        for name, tensor in tensors.items():
            await update.apply(name, tensor)
        await update.commit()
        assert (await engine.health()).digests == {0: manifest.digest}
        return [await engine.score(row, version=0, temperature=1.0) for row in batch.ragged(TOKENS)]
    finally:
        await engine.close()


def gap(found: list[Array], trained: Ragged) -> float:
    """Mean |Δ log-prob| per token."""
    return float(np.abs(np.concatenate(found) - trained.values).mean())


def scored(engine: TorchTrainingEngine, batch: Batch, **options: Any) -> Ragged:
    found = engine.forward(batch, **options)["logprobs"]
    assert isinstance(found, Ragged)
    return found


def test_QRL_4_an_aligned_trainer_and_its_engine_agree_and_an_unaligned_one_does_not(
    scheme: Quantization, model: str, trainer: Any
) -> None:
    aligned, plain, batch = trainer(scheme), trainer(None), rows(count=20)
    near = gap(asyncio.run(served(model, scheme, aligned.weight_source(), batch)), scored(aligned, batch))
    low_bit = LowBitSource(plain.weight_source(), scheme)
    far = gap(asyncio.run(served(model, scheme, low_bit, batch)), scored(plain, batch))
    assert near < 1e-3
    assert near * 20 < far


def test_QRL_1_both_sides_publish_the_same_parts_of_the_same_weights(scheme: Quantization, trainer: Any) -> None:
    aligned, _ = published(trainer(scheme).weight_source(), 0)
    plain, _ = published(LowBitSource(trainer(None).weight_source(), scheme), 0)
    assert aligned.digest == plain.digest


def test_QRL_1_what_is_published_is_what_the_trainer_multiplies_by(scheme: Quantization, trainer: Any) -> None:
    engine = trainer(scheme)
    train(engine, steps=2)
    _, tensors = published(engine.weight_source(), 0)
    from headrace_torch.low_bit.layers import covered_layers
    from headrace_torch.low_bit.weight import low_bit_weight

    layers = covered_layers(engine._started._model, scheme)
    assert len(layers) == 7 * SCRATCH["layers"]  # type: ignore[operator]
    for name, layer in layers.items():
        parts = {
            part: tensors[full]
            for part in ("weight", "weight_packed", "weight_scale")
            if (full := name.removesuffix("weight") + part) in tensors
        }
        arrived = low_bit_weight(parts, scheme.format, columns=layer.in_features, device="cpu")
        held = layer.low_bit
        assert held is not None
        assert torch.equal(arrived.values.view(torch.uint8), held.values.view(torch.uint8))
        assert torch.equal(arrived.scales, held.scales)


def test_weights_are_quantised_anew_after_every_step(scheme: Quantization, trainer: Any) -> None:
    engine, batch = trainer(scheme), rows(count=4)
    first, before = published(engine.weight_source(), 0)[0], scored(engine, batch).values
    train(engine)
    second, after = published(engine.weight_source(), 1)[0], scored(engine, batch).values
    assert first.digest != second.digest
    assert np.abs(after - before).max() > 1e-3


def test_an_aligned_trainer_learns(scheme: Quantization, trainer: Any) -> None:
    engine, batch = trainer(scheme), rows(seed=0)
    before = scored(engine, batch).values.sum()
    for _ in range(8):
        step = engine.begin_step(LOSS)
        step.accumulate(batch)
        step.finish(denominator=100.0)
    assert scored(engine, batch).values.sum() > before + 10


def test_a_snapshot_keeps_the_low_bit_weights_of_its_time(scheme: Quantization, trainer: Any) -> None:
    engine, batch = trainer(scheme), rows(count=4)
    engine.snapshot("reference")
    then = scored(engine, batch).values
    train(engine)
    assert np.array_equal(scored(engine, batch, weights="reference").values, then)
    assert not np.array_equal(scored(engine, batch).values, then)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_has_the_same_low_bit_weights_and_snapshots(
    scheme: Quantization, dtype: str, trainer: Any, tmp_path: Path
) -> None:
    engine, batch = trainer(scheme, dtype=dtype), rows(count=4)
    engine.snapshot("reference")
    train(engine, steps=2)
    engine.save(str(tmp_path / "save"), kind="resume")
    again = trainer(scheme, dtype=dtype)
    again.load(str(tmp_path / "save"))
    assert published(again.weight_source(), 0)[0] == published(engine.weight_source(), 0)[0]
    for weights in ("current", "reference"):
        found, expected = (scored(e, batch, weights=weights).values for e in (again, engine))
        assert np.array_equal(found, expected)


def test_the_weights_that_are_exported_are_those_that_are_trained(trainer: Any, tmp_path: Path) -> None:
    engine = trainer(SCHEMES["w4a16_int4"])
    train(engine)
    engine.save(str(tmp_path / "export"), kind="export")
    exported = read_tensors(tmp_path / "export")
    masters = engine._started._updater.parameters.masters
    assert all(np.array_equal(exported[name], master.detach().numpy()) for name, master in masters.items())


def test_in_bfloat16_both_sides_compute_the_same_too(scheme: Quantization, model: str, trainer: Any) -> None:
    aligned, batch = trainer(scheme, dtype="bfloat16"), rows(count=10)
    found = asyncio.run(served(model, scheme, aligned.weight_source(), batch, dtype="bfloat16"))
    assert gap(found, scored(aligned, batch)) < 0.1


def test_layers_of_which_only_some_are_low_bit_are_served(model: str, trainer: Any) -> None:
    scheme = W8A8Int8(W8A8Int8.Settings(keep=("embed_tokens", "lm_head", "k_proj", "up_proj")))
    aligned, batch = trainer(scheme), rows(count=4)
    found = asyncio.run(served(model, scheme, aligned.weight_source(), batch))
    assert gap(found, scored(aligned, batch)) < 1e-3


def test_a_scheme_that_covers_an_embedding_is_refused(trainer: Any, model: str) -> None:
    scheme = W8A8Int8(W8A8Int8.Settings(keep=()))
    with pytest.raises(EngineError, match=r"embed_tokens\.weight cannot be low-bit: it belongs to a Embedding"):
        trainer(scheme)


NAME = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (lambda t: {n: a for n, a in t.items() if n != f"{NAME}_scale"}, f"the manifest lacks {NAME}_scale"),
        (lambda t: {**t, NAME: t[NAME].astype(np.int16)}, f"{NAME}: dtype int16, the quantisation scheme says int8"),
        (lambda t: {**t, f"{NAME}_scale": t[f"{NAME}_scale"].T}, rf"{NAME}_scale: shape \(1, 96\), .*model \(96, 1\)"),
        (lambda t: {**t, "further": t[NAME]}, "the model has no further"),
    ],
)
async def test_parts_that_do_not_make_up_a_model_are_not_served(
    spoil: Any, message: str, model: str, trainer: Any
) -> None:
    scheme = SCHEMES["w8a8_int8"]
    engine = TorchInferenceEngine(TorchInferenceSettings())
    await engine.start(InferenceContext(name="rollout-0", model_path=model, version=-1, threads=1, quantization=scheme))
    try:
        _, tensors = published(trainer(scheme).weight_source(), 0)
        spoiled = spoil(tensors)
        infos = tuple(tensor_info(name, tensor) for name, tensor in spoiled.items())
        manifest = WeightManifest(version=0, tensors=infos, nbytes=0, digest="spoiled")
        update = await engine.begin_update(manifest)
        for name, tensor in spoiled.items():
            await update.apply(name, tensor)
        with pytest.raises(EngineError, match=message):
            await update.commit()
        assert (await engine.health()).versions == (-1,)
    finally:
        await engine.close()
