"""An adapter is trained, and nothing else; it is saved, exported and resumed from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import TrainingContext
from headrace.contract.adapters import adapted_weight, adapter_names, is_adapter, merged
from headrace.errors import EngineError, RunError
from headrace.testing.tensors import read_tensors, write_tensors
from headrace_quantization.schemes import W8A8Int8
from headrace_torch.training import LoraSettings, TorchTrainingEngine, TorchTrainingSettings
from support.lora import LORA, LOSS, SCRATCH, read, rows, scored, train


def test_an_adapter_changes_nothing_before_it_is_trained(trainer: Any) -> None:
    assert np.array_equal(scored(trainer(), rows()), scored(trainer(None), rows()))


def test_the_gradient_of_an_adapter_is_that_of_the_weight_through_its_factors(trainer: Any, tmp_path: Path) -> None:
    """Of W + s B A: dA = s Bᵀ dW and dB = s dW Aᵀ, with dW from a trainer of all weights on the merged model."""
    adapted = trainer()
    train(adapted, steps=2)  # B is not 0 then
    adapted.save(str(tmp_path / "merged"), kind="export")
    whole = trainer(None, path=str(tmp_path / "merged"))
    found, expected = gradients(adapted), gradients(whole)
    tensors = {n: p.detach() for n, p in adapted._started._updater.parameters.masters.items()}
    assert {adapted_weight(name) for name in found} == {n for n in expected if n.endswith("_proj.weight")}
    for name in expected:
        if name.endswith("_proj.weight"):
            a, b = adapter_names(name)
            scale = LORA.alpha / LORA.rank
            torch.testing.assert_close(found[a], scale * tensors[b].T @ expected[name], rtol=1e-3, atol=1e-4)
            torch.testing.assert_close(found[b], scale * expected[name] @ tensors[a].T, rtol=1e-3, atol=1e-4)


def gradients(engine: TorchTrainingEngine) -> dict[str, torch.Tensor]:
    step = engine.begin_step(LOSS)
    step.accumulate(rows(seed=9))
    found = {n: p.grad.clone() for n, p in engine._started._updater.parameters.masters.items() if p.grad is not None}
    step.discard()
    return found


def test_training_moves_the_adapter_and_nothing_else(trainer: Any) -> None:
    engine = trainer()
    before, likely = read(engine.weight_source()), scored(engine, rows()).sum()
    for _ in range(6):
        step = engine.begin_step(LOSS)
        step.accumulate(rows())
        step.finish(denominator=100.0)
    after = read(engine.weight_source())
    moved = {name for name in after if not np.array_equal(before[name], after[name])}
    assert moved == {name for name in after if is_adapter(name)}
    assert len(moved) == 2 * 7 * SCRATCH["layers"]  # type: ignore[operator]
    assert scored(engine, rows()).sum() > likely + 10


def test_only_targeted_layers_get_an_adapter(trainer: Any) -> None:
    engine = trainer(LoraSettings(rank=2, targets=("q_proj", "v_proj")))
    layers = {name.rsplit(".", 3)[1] for name, _ in engine.weight_source().changing()}
    assert layers == {"q_proj", "v_proj"}


def test_a_critic_is_trained_beside_an_adapter(trainer: Any) -> None:
    engine = trainer(values=True)
    masters = engine._started._updater.parameters.masters
    assert {name for name in masters if not is_adapter(name)} == {"critic.weight", "critic.bias"}
    assert not {name for name, _ in engine.weight_source().tensors()} & {"critic.weight", "critic.bias"}


def test_the_base_of_a_weight_source_is_the_same_object_after_every_step(trainer: Any) -> None:
    engine = trainer()
    first = engine.weight_source()
    train(engine)
    second = engine.weight_source()
    assert first.base is second.base is not None
    names = [name for name, _ in second.tensors()]
    assert names == [n for n, _ in second.base.tensors()] + [n for n, _ in second.changing()]
    assert trainer(None).weight_source().base is None


def test_a_snapshot_shares_the_base_and_keeps_the_adapter_of_its_time(trainer: Any) -> None:
    engine = trainer()
    train(engine)
    then = scored(engine, rows())
    engine.snapshot("reference")
    train(engine)
    assert np.array_equal(scored(engine, rows(), weights="reference"), then)
    assert not np.array_equal(scored(engine, rows()), then)
    current, frozen = engine._started._model, engine._started._snapshots["reference"].model
    same = {n for (n, p), q in zip(current.named_parameters(), frozen.parameters(), strict=True) if p is q}
    assert same == {name for name, _ in current.named_parameters() if not is_adapter(name)}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_trainer_goes_on_to_the_bit_and_its_save_has_no_base(
    dtype: str, trainer: Any, tmp_path: Path
) -> None:
    engine = trainer(dtype=dtype)
    train(engine)
    engine.snapshot("reference")
    train(engine, steps=2)
    engine.save(str(tmp_path / "save"), kind="resume")
    again = trainer(dtype=dtype)
    again.load(str(tmp_path / "save"))
    for each in (engine, again):
        train(each, steps=2)
    found, expected = read(again.weight_source()), read(engine.weight_source())
    assert all(np.array_equal(found[name], expected[name]) for name in expected)
    for weights in ("current", "reference"):
        assert np.array_equal(scored(again, rows(), weights=weights), scored(engine, rows(), weights=weights))
    saved = {name for file in (tmp_path / "save").glob("*.safetensors") for name in read_file(file)}
    assert not {name for name in expected if not is_adapter(name)} & saved


def read_file(file: Path) -> list[str]:
    from safetensors import safe_open

    with safe_open(str(file), framework="numpy") as opened:
        return list(opened.keys())


def test_a_state_of_another_adapter_or_of_another_base_is_refused(trainer: Any, model: str, tmp_path: Path) -> None:
    engine = trainer()
    engine.save(str(tmp_path / "save"), kind="resume")
    other = tmp_path / "other"
    other.mkdir()
    for file in Path(model).iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    write_tensors(other / "model.safetensors", {n: 1.01 * t for n, t in read_tensors(model).items()})
    for wrong in (trainer(LoraSettings(rank=4, alpha=6.0)), trainer(None), trainer(path=str(other))):
        before = read(wrong.weight_source())
        with pytest.raises(RunError, match="training state has adapter"):
            wrong.load(str(tmp_path / "save"))
        assert all(np.array_equal(t, before[name]) for name, t in read(wrong.weight_source()).items())


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3"])
def test_an_export_is_the_merged_model(
    architecture: str, trainer: Any, models: Callable[..., str], tmp_path: Path
) -> None:
    path = models(architecture)
    engine = trainer(path=path)
    train(engine, steps=3)
    engine.save(str(tmp_path / "export"), kind="export")
    exported, original = read_tensors(tmp_path / "export"), read_tensors(path)
    assert {n: t.shape for n, t in exported.items()} == {n: t.shape for n, t in original.items()}
    changed = {name for name in exported if not np.array_equal(exported[name], original[name])}
    assert changed == {name for name in exported if name.endswith("_proj.weight")}
    for name, tensor in merged(read(engine.weight_source())).items():
        np.testing.assert_allclose(exported[name], tensor, rtol=1e-5, atol=1e-7)
    found = scored(trainer(None, path=str(tmp_path / "export")), rows())
    assert np.abs(found - scored(engine, rows())).max() < 1e-3


def test_lora_and_muon_or_a_quantisation_scheme_are_refused_together(model: str) -> None:
    with pytest.raises(ValueError, match='optimizer must be "adamw" with lora'):
        TorchTrainingSettings(lora=LORA, optimizer="muon")
    engine, scheme = TorchTrainingEngine(TorchTrainingSettings(lora=LORA)), W8A8Int8(W8A8Int8.Settings())
    context = TrainingContext(name="trainer", model_path=model, seed=5, threads=1, total_steps=10, quantization=scheme)
    with pytest.raises(EngineError, match="an adapter is not trained in a quantisation scheme's arithmetic"):
        engine.start(context)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rank": 0}, "lora.rank must be at least 1"),
        ({"alpha": 0.0}, "lora.alpha must be above 0"),
        ({"targets": ()}, "lora.targets must name some layers"),
        ({"targets": ("q_proj", "q_proj")}, "each once"),
    ],
)
def test_settings_of_an_adapter_are_judged(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LoraSettings(**settings)
