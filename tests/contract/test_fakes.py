"""What the fakes rest on: no engine and no pytest, slopes that are derivatives, files that others can read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from headrace.contract import Array
from headrace.errors import ConfigError, EngineError, RunError
from headrace.testing import FakeStorage, FakeTrainingEngine, PerToken
from headrace.testing.bigram import load_bigram
from headrace.testing.tensors import read_tensors, write_tensors
from headrace.testing.trouble import FakeSettings, Trouble


def test_headrace_brings_no_fakes_along_and_the_fakes_no_pytest() -> None:
    code = (
        "import sys, headrace, headrace.cli; assert 'headrace.testing' not in sys.modules; import headrace.testing;"
        "print(*sorted({'pytest', 'torch', 'tokenizers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.stdout.split(), done.stderr) == ([], "")


@pytest.mark.parametrize(
    "expression",
    [
        lambda x, w: -(w * x).sum(),
        lambda x, w: (w * (x - w).exp()).sum(),
        lambda x, w: 2.0 * ((x + 1.0) * (1.0 - x)).sum() + (-x).sum(),
        lambda x, w: (x.exp().clip(0.3, 0.6) * w).sum(),
    ],
)
def test_slopes_are_derivatives(expression: Callable[[PerToken, Array], Any]) -> None:
    logprobs, weights, step = -np.array([0.2, 0.9, 1.7]), np.array([1.0, -2.0, 0.5]), 1e-6
    gradient = expression(PerToken.of(logprobs), weights).gradient
    for token in range(3):
        nudge = step * (np.arange(3) == token)
        up, down = (float(expression(PerToken.of(logprobs + s * nudge), weights)) for s in (1, -1))
        assert gradient[token] == pytest.approx((up - down) / (2 * step), abs=1e-6)


def test_weight_files_are_those_of_safetensors(tmp_path: Path) -> None:
    tensors = {
        "a": np.arange(6, dtype=np.float32).reshape(2, 3),
        "b": np.ones(4, dtype=ml_dtypes.bfloat16),
        "c": np.array(7),
    }
    write_tensors(tmp_path / "ours.safetensors", tensors)
    theirs = load_file(tmp_path / "ours.safetensors")
    assert {name: tensor.tolist() for name, tensor in theirs.items()} == {n: t.tolist() for n, t in tensors.items()}
    (tmp_path / "other").mkdir()
    save_file({"a": tensors["a"]}, tmp_path / "other" / "theirs.safetensors", metadata={"format": "pt"})
    assert read_tensors(tmp_path / "other")["a"].tolist() == tensors["a"].tolist()


def test_a_fake_fails_after_as_many_pieces_of_work_as_its_settings_say() -> None:
    storage = FakeStorage(FakeStorage.Settings(fail_after=2))
    for _ in range(2):
        storage.get([], [])
    with pytest.raises(RunError, match=r"reading rows failed, as fail_after = 2 says"):
        storage.get([], [])


def test_latency_is_what_every_piece_of_work_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr("time.sleep", slept.append)
    trouble = Trouble(FakeSettings(latency=0.25), error=EngineError)
    trouble.work("this")
    trouble.work("that")
    assert slept == [0.25, 0.25]


def test_trouble_below_nothing_is_refused() -> None:
    for wrong in ({"latency": -1.0}, {"fail_after": -1}):
        with pytest.raises(ValueError, match="at least 0"):
            FakeSettings(**wrong)


def test_fake_engines_refuse_other_models_by_name(tmp_path: Path) -> None:
    with pytest.raises(EngineError, match="holds no bigram model"):
        load_bigram(str(tmp_path))
    with pytest.raises(ConfigError, match="unknown settings \\['layers'\\]"):
        FakeTrainingEngine.create_model(str(tmp_path), settings={"layers": 2}, seed=0)
