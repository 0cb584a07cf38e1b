"""A training state survives a save and a load bit for bit, and a damaged one is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.errors import RunError
from headrace_torch.training import TorchTrainingEngine

SETTINGS: list[dict[str, Any]] = [
    {"weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2},
    {"optimizer": "muon", "weight_decay": 0.1, "schedule": "linear"},
    {"dtype": "bfloat16", "learning_rate": 1e-4},
    {"optimizer": "muon", "values": True},
    {"dtype": "bfloat16", "values": True, "learning_rate": 1e-4},
]


def everything(engine: TorchTrainingEngine) -> dict[str, Any]:
    """All tensors a step reads, as numpy."""
    trainer = engine._started
    updater = trainer._updater
    tensors = {f"masters/{n}": p for n, p in updater.parameters.masters.items()}
    tensors |= {f"optimizer/{n}": t for n, t in updater.optimizer.state().items()}
    tensors |= {f"model/{n}": p.float() for n, p in updater.parameters.network.named_parameters()}
    for name, model in trainer._snapshots.items():
        tensors |= {f"{name}/{n}": p.float() for n, p in model.named_parameters()}
    return {n: t.detach().numpy().copy() for n, t in tensors.items()} | {
        "steps": np.array(updater.steps),
        "random": torch.get_rng_state().numpy().copy(),
    }


def assert_same(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not np.array_equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_training_goes_on_bit_for_bit_after_a_load(
    settings: dict[str, Any], engine: Any, batch: Any, spec: Any, train: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "save")
    batches = [batch([5, 9, 13, 4], seed=seed) for seed in range(6)]
    whole, first = engine(**settings), engine(**settings)
    whole_results = [train(whole, spec(), rows) for rows in batches[:2]]
    whole.snapshot("reference")
    whole_results += [train(whole, spec(), rows) for rows in batches[2:]]
    for rows in batches[:2]:
        train(first, spec(), rows)
    first.snapshot("reference")
    train(first, spec(), batches[2])
    first.save(path, kind="resume")
    resumed = engine(**settings)
    train(resumed, spec(), batch([30, 30]))
    resumed.snapshot("other")
    resumed.load(path)
    assert_same(everything(resumed), everything(first))
    assert [train(resumed, spec(), rows) for rows in batches[3:]] == whole_results[3:]
    assert_same(everything(resumed), everything(whole))


def test_the_random_state_comes_back(engine: Any, tmp_path: Path) -> None:
    one = engine()
    one.save(str(tmp_path / "save"), kind="resume")
    drawn = torch.rand(3)
    torch.rand(100)
    one.load(str(tmp_path / "save"))
    assert torch.equal(torch.rand(3), drawn)


def test_a_state_before_the_first_step_can_be_saved(
    engine: Any, batch: Any, spec: Any, train: Any, tmp_path: Path
) -> None:
    fresh, used = engine(), engine()
    fresh.save(str(tmp_path / "save"), kind="resume")
    train(used, spec(), batch([5]))
    used.load(str(tmp_path / "save"))
    results = [train(one, spec(), batch([7, 8])) for one in (fresh, used)]
    assert results[0] == results[1]
    assert_same(everything(fresh), everything(used))


@pytest.fixture
def saved(engine: Any, batch: Any, spec: Any, train: Any, tmp_path: Path) -> Path:
    one = engine()
    train(one, spec(), batch([5, 6]))
    one.snapshot("reference")
    one.save(str(tmp_path / "save"), kind="resume")
    return tmp_path / "save"


FILES = [
    "weights.safetensors",
    "optimizer.safetensors",
    "random.safetensors",
    "snapshot-0.safetensors",
    "training.json",
]


def test_a_save_is_these_files_and_nothing_is_left_beside_it(saved: Path) -> None:
    assert sorted(file.name for file in saved.iterdir()) == sorted(FILES)
    assert [path.name for path in saved.parent.iterdir()] == ["save"]


@pytest.mark.parametrize("file", FILES)
@pytest.mark.parametrize("damage", ["delete", "truncate"])
def test_a_missing_or_damaged_file_is_refused_by_name(file: str, damage: str, saved: Path, engine: Any) -> None:
    if damage == "delete":
        (saved / file).unlink()
    else:
        (saved / file).write_bytes((saved / file).read_bytes()[:40])
    with pytest.raises(RunError, match=file):
        engine().load(str(saved))


def test_an_optimizer_file_without_its_moments_is_refused(saved: Path, engine: Any) -> None:
    from safetensors.torch import load_file, save_file

    file = str(saved / "optimizer.safetensors")
    tensors = load_file(file)
    save_file({n: t for n, t in tensors.items() if not n.endswith("exp_avg")}, file)
    with pytest.raises(RunError, match=r"does not fit the model: .*exp_avg"):
        engine().load(str(saved))
    save_file({}, file)
    with pytest.raises(RunError, match="no optimiser state after 1 steps"):
        engine().load(str(saved))


def test_a_state_of_another_model_or_optimizer_is_refused(saved: Path, engine: Any, model: Any) -> None:
    with pytest.raises(RunError, match="training state has model"):
        engine(model(layers=1)).load(str(saved))
    with pytest.raises(RunError, match="training state has optimizer 'adamw', expected 'muon'"):
        engine(optimizer="muon").load(str(saved))
    manifest = json.loads((saved / "training.json").read_text())
    (saved / "training.json").write_text(json.dumps({**manifest, "format": 2}))
    with pytest.raises(RunError, match="training state has format 2, expected 1"):
        engine().load(str(saved))


@pytest.mark.parametrize("file", ["weights", "optimizer", "snapshot-0"])
def test_a_refused_load_changes_nothing(file: str, saved: Path, engine: Any, batch: Any, spec: Any, train: Any) -> None:
    from safetensors.torch import load_file, save_file

    one = engine()
    for seed in range(2):
        train(one, spec(), batch([5, 6], seed=seed))
    before = everything(one)
    tensors = load_file(str(saved / f"{file}.safetensors"))
    lost = max(tensors)
    save_file({n: t for n, t in tensors.items() if n != lost}, str(saved / f"{file}.safetensors"))
    with pytest.raises(RunError, match=f"{lost} is missing"):
        one.load(str(saved))
    assert_same(everything(one), before)


def test_a_save_replaces_an_earlier_one_and_fills_an_empty_directory(saved: Path, engine: Any) -> None:
    engine().save(str(saved), kind="resume")
    assert json.loads((saved / "training.json").read_text())["steps"] == 0
    assert not (saved / "snapshot-0.safetensors").exists()
    (saved.parent / "empty").mkdir()
    engine().save(str(saved.parent / "empty"), kind="resume")
    assert (saved.parent / "empty" / "training.json").exists()


@pytest.mark.parametrize("kind", ["resume", "export"])
def test_a_directory_that_holds_something_else_is_left_alone(kind: str, engine: Any, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(RunError, match="holds something else than a save"):
        engine().save(str(tmp_path), kind=kind)
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_a_save_that_fails_leaves_the_earlier_one(saved: Path, engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace_torch.trainer import resume

    def full(tensors: Any, file: str) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(resume, "save_file", full)
    with pytest.raises(OSError, match="no space left"):
        engine().save(str(saved), kind="resume")
    monkeypatch.undo()
    assert [path.name for path in saved.parent.iterdir()] == ["save"]
    assert json.loads((saved / "training.json").read_text())["steps"] == 1


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_an_export_reloads_in_transformers_with_the_same_logits(
    dtype: str, engine: Any, batch: Any, rows: Any, spec: Any, train: Any, tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    one = engine(dtype=dtype)
    train(one, spec(), batch([5, 6, 7]))
    one.save(str(tmp_path / "export"), kind="export")
    peer = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
    assert peer.dtype == getattr(torch, dtype)
    ids = list(range(1, 30))
    with torch.no_grad():
        table = peer(torch.tensor([ids])).logits[0, :-1].float().log_softmax(-1)
    expected = table.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1).numpy()
    found = one.forward(rows([ids]))["logprobs"].values[1:]
    np.testing.assert_allclose(found, expected, atol=1e-5 if dtype == "float32" else 0.1)
    assert AutoTokenizer.from_pretrained(tmp_path / "export").decode([3, 4]) == "01"
