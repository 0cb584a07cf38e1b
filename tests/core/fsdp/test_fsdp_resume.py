"""What any number of ranks has saved, any number goes on from: as many of them bit for bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import Array, Snapshots
from headrace.errors import RunError
from headrace.testing.suites.trainees import VALUED, Trainee
from support.fsdp import started

SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "warmup_steps": 2},
    pytest.param({"optimizer": "muon", "values": True}, marks=pytest.mark.engine),
    pytest.param({"dtype": "bfloat16", "learning_rate": 1e-4}, marks=pytest.mark.engine),
]


def begin(trainee: Trainee, path: Path, **how: Any) -> None:
    """Two steps with a snapshot between, and a save."""
    engine = trainee.engine
    assert isinstance(engine, Snapshots)
    trainee.train(trainee.batch(), **how)
    engine.snapshot("kept")
    trainee.train(trainee.batch(seed=1), **how)
    trainee.engine.save(str(path), kind="resume")


def go_on(trainee: Trainee, **how: Any) -> dict[str, Array]:
    """The weights after two more steps, and what the snapshot gives."""
    for seed in (2, 3):
        trainee.train(trainee.batch(seed=seed), **how)
    kept = trainee.engine.forward(trainee.batch(), weights="kept")["logprobs"].values
    return {**trainee.weights(), "the snapshot's": kept}


def same(ours: dict[str, Array], theirs: dict[str, Array]) -> bool:
    return all(ours[name].tobytes() == theirs[name].tobytes() for name in theirs)


def close(ours: dict[str, Array], theirs: dict[str, Array], *, atol: float) -> bool:
    return all(np.allclose(ours[n].astype(np.float32), theirs[n].astype(np.float32), atol=atol) for n in theirs)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_save_is_gone_on_from_by_one_rank_and_by_two(
    settings: dict[str, Any], tiny_model: str, tmp_path: Path
) -> None:
    how = {"loss": VALUED} if settings.get("values") else {}
    atol = 2e-2 if settings.get("dtype") else 5e-4
    one, two = tmp_path / "one", tmp_path / "two"
    with started(tiny_model, ranks=2, **settings) as trainee:
        begin(trainee, two, **how)
        from_two = go_on(trainee, **how)
    with started(tiny_model, ranks=1, **settings) as trainee:
        begin(trainee, one, **how)
        from_one = go_on(trainee, **how)
        trainee.engine.load(str(two))
        assert close(go_on(trainee, **how), from_two, atol=atol)
        trainee.engine.load(str(one))
        assert same(go_on(trainee, **how), from_one)
    with started(tiny_model, ranks=2, **settings) as trainee:
        trainee.engine.load(str(two))
        assert same(go_on(trainee, **how), from_two)
        trainee.engine.load(str(one))
        assert close(go_on(trainee, **how), from_one, atol=atol)
    assert close(from_one, from_two, atol=atol)


@pytest.fixture
def saved(tiny_model: str, tmp_path: Path) -> Path:
    with started(tiny_model, ranks=1) as trainee:
        begin(trainee, tmp_path / "save")
    return tmp_path / "save"


def test_a_save_has_safetensors_and_json_and_nothing_that_runs_code(saved: Path) -> None:
    assert sorted(file.suffix for file in saved.iterdir()) == [".json", ".safetensors"]
    assert json.loads((saved / "training.json").read_text())["ranks"] == 1


def test_a_file_that_is_cut_is_refused_by_name(saved: Path, tiny_model: str) -> None:
    (file,) = saved.glob("*.safetensors")
    file.write_bytes(file.read_bytes()[:-8])
    with started(tiny_model, ranks=1) as trainee, pytest.raises(RunError, match=rf"{file.name} has \d+ bytes"):
        trainee.engine.load(str(saved))


def test_a_state_of_another_optimiser_is_refused(saved: Path, tiny_model: str) -> None:
    with (
        started(tiny_model, ranks=1, optimizer="muon") as trainee,
        pytest.raises(RunError, match="training state has optimizer 'adamw', expected 'muon'"),
    ):
        trainee.engine.load(str(saved))


def test_a_state_that_lacks_a_tensor_is_refused_by_its_name(saved: Path, tiny_model: str) -> None:
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    (file,) = saved.glob("*.safetensors")
    with safe_open(str(file), framework="pt") as stored:
        metadata = stored.metadata()
    tensors = load_file(str(file))
    del tensors["optimizer/model.norm.weight/exp_avg"]
    save_file(tensors, str(file), metadata=metadata)
    manifest = json.loads((saved / "training.json").read_text())
    (saved / "training.json").write_text(json.dumps({**manifest, "files": {file.name: file.stat().st_size}}))
    with started(tiny_model, ranks=1) as trainee:
        before = trainee.weights()
        with pytest.raises(RunError, match=r"optimizer/model.norm.weight/exp_avg is missing"):
            trainee.engine.load(str(saved))
        assert same(trainee.weights(), before)
