"""On GPUs the ranks compute what they compute on CPUs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.testing.suites.trainees import VALUED
from support.fsdp import started

GPUS = torch.cuda.device_count()

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not GPUS, reason="there is no GPU")]


@pytest.mark.parametrize("settings", [{}, {"cpu_offload": True}, {"optimizer": "muon"}], ids=str)
def test_ranks_on_gpus_train_as_the_torch_engine_does(
    settings: dict[str, Any], tiny_model: str, tmp_path: Path
) -> None:
    found = []
    for ranks in (None, min(2, GPUS)):
        own = {"device": "cuda", **settings} if ranks else {k: v for k, v in settings.items() if k == "optimizer"}
        with started(tiny_model, ranks=ranks, values=True, **own) as trainee:
            before = trainee.engine.forward(trainee.batch())["logprobs"].values
            result = trainee.train(trainee.batch(), loss=VALUED)
            trainee.engine.save(str(tmp_path / f"save-{ranks}"), kind="resume")
            trainee.engine.load(str(tmp_path / f"save-{ranks}"))
            found.append((before, result, trainee.weights()))
    (logprobs, plain, weights), (theirs, sharded, others) = found
    np.testing.assert_allclose(theirs, logprobs, atol=1e-4)
    assert sharded.loss == pytest.approx(plain.loss, rel=1e-4)
    assert sharded.gradient_norm == pytest.approx(plain.gradient_norm, rel=1e-4)
    for name, array in weights.items():
        np.testing.assert_allclose(others[name], array, atol=1e-2)
