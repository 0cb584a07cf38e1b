"""On GPUs the ranks compute what they compute on CPUs, without the stand-in."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from support.megatron import LAYOUTS, slope, started

GPUS = torch.cuda.device_count()

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not GPUS, reason="there is no GPU"),
    pytest.mark.filterwarnings("default"),
]


@pytest.mark.parametrize("layout", ["one", "tp2", "dp2", "pp2"])
def test_ranks_on_gpus_train_as_the_torch_engine_does(layout: str, tiny_model: str, tmp_path: Path) -> None:
    if layout != "one" and GPUS < 2:
        pytest.skip("it needs two GPUs")
    found = []
    for ranks in (None, LAYOUTS[layout]):
        with started(tiny_model, ranks, **({} if ranks is None else {"device": "cuda"})) as trainee:
            before, logprobs = trainee.weights(), trainee.engine.forward(trainee.batch())["logprobs"].values
            result = trainee.train(trainee.batch())
            after = trainee.weights()
            trainee.engine.save(str(tmp_path / f"save-{len(found)}"), kind="resume")
            trainee.engine.load(str(tmp_path / f"save-{len(found)}"))
            found.append((logprobs, result, slope(before, after)))
    (logprobs, plain, gradient), (theirs, result, other) = found
    np.testing.assert_allclose(theirs, logprobs, atol=1e-4)
    assert result.loss == pytest.approx(plain.loss, rel=1e-4)
    assert np.linalg.norm(other - gradient) < 1e-3 * np.linalg.norm(gradient)
