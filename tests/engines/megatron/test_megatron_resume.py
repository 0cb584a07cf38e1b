"""A save of one layout of ranks is the state of any other. Run by ``make test-engines``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.errors import RunError
from support.megatron import LAYOUTS, ONE, started, write_mixture

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]

TRAINED: dict[str, Any] = {"learning_rate": 1e-3, "eps": 1e-4, "betas": (0.9, 0.95)}


@pytest.mark.parametrize(
    ("writer", "reader"), [("one", "tp2"), ("tp2", "one"), ("one", "dp2"), ("dp2", "one"), ("pp2", "tp2")]
)
def test_a_save_moves_between_one_rank_and_two(writer: str, reader: str, tiny_model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    with started(tiny_model, LAYOUTS[writer], **TRAINED) as trainee:
        for seed in range(3):
            trainee.train(trainee.batch(seed=seed))
        trainee.engine.snapshot("kept")
        saved = trainee.weights()
        trainee.engine.save(path, kind="resume")
        trainee.train(trainee.batch(seed=3))
        expected = trainee.weights()
        kept = trainee.engine.forward(trainee.batch(), weights="kept")["logprobs"].values
    with started(tiny_model, LAYOUTS[reader], **TRAINED) as trainee:
        trainee.engine.load(path)
        loaded = trainee.weights()
        assert all(np.array_equal(loaded[name], saved[name]) for name in saved)
        trainee.train(trainee.batch(seed=3))
        found = trainee.weights()
        again = trainee.engine.forward(trainee.batch(), weights="kept")["logprobs"].values
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, atol=1e-5)
    np.testing.assert_allclose(again, kept, atol=1e-5)


def test_experts_on_two_ranks_go_on_bit_for_bit_and_are_refused_by_others(tmp_path: Path) -> None:
    model, path = write_mixture(tmp_path / "model"), str(tmp_path / "save")
    found = []
    with started(model, {"data_parallel": 2, "expert_parallel": 2}, **TRAINED) as trainee:
        trainee.train(trainee.batch())
        trainee.engine.save(path, kind="resume")
        for _ in range(2):
            trainee.train(trainee.batch(seed=1))
            found.append(trainee.weights())
            trainee.engine.load(path)
    assert all(np.array_equal(found[0][name], found[1][name]) for name in found[0])
    with started(model, ONE, **TRAINED) as trainee, pytest.raises(RunError, match="expert_parallel 2, expected 1"):
        trainee.engine.load(path)


def test_a_save_of_another_dtype_is_refused_by_name(tiny_model: str, tmp_path: Path) -> None:
    path = str(tmp_path / "save")
    with started(tiny_model, {}) as trainee:
        trainee.engine.save(path, kind="resume")
    with started(tiny_model, {}, dtype="bfloat16") as trainee, pytest.raises(RunError, match="dtype 'float32'"):
        trainee.engine.load(path)
