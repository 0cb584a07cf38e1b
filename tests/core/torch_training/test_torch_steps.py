"""One optimiser step: sums over micro-batches, one division, one check, one clip."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from headrace.contract import Batch
from headrace.contract.columns import TOKENS
from headrace_torch.training import TorchTrainingSettings

LENGTHS = [3, 25, 2, 17, 9, 40, 33, 4]
SPLITS = [
    [[0, 1, 2, 3, 4, 5, 6, 7]],
    [[0], [1], [2], [3], [4], [5], [6], [7]],
    [[7, 0, 3], [5], [6, 1, 2, 4]],
    [[], [0, 1, 2, 3], [], [4, 5, 6, 7]],
]


def parts_of(batch: Batch, split: list[list[int]]) -> list[Batch]:
    return [batch.take(rows) for rows in split]


def relative(found: Any, expected: Any) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


@pytest.mark.parametrize("entropy", [False, True])
def test_the_gradient_does_not_depend_on_the_split_or_the_order(
    entropy: bool, engine: Any, batch: Any, spec: Any, gradient: Any
) -> None:
    one, rows, loss = engine(), batch(LENGTHS), spec(entropy=entropy)
    slopes = [gradient(one, loss, parts_of(rows, split)) for split in SPLITS]
    assert max(relative(slope, slopes[0]) for slope in slopes[1:]) < 1e-6


def test_the_gradient_does_not_depend_on_sharing_beginnings(engine: Any, rows: Any, spec: Any, gradient: Any) -> None:
    shared = rows([[1, 9, 8, 7, 4, 5], [1, 9, 8, 7, 4, 6, 3], [1, 9, 8, 7, 5], [1, 9, 8, 7, 4, 5]], prompt=3)
    one = engine()
    together = gradient(one, spec(), [shared])
    apart = gradient(one, spec(), [shared.take([row]) for row in range(4)])
    assert relative(together, apart) < 1e-6


def test_loss_and_gradient_are_those_of_transformers(
    engine: Any, model: Any, batch: Any, spec: Any, gradient: Any, train: Any
) -> None:
    from transformers import AutoModelForCausalLM

    rows = batch(LENGTHS)
    peer = AutoModelForCausalLM.from_pretrained(model(), dtype=torch.float32)
    losses = []
    for row in rows.ragged(TOKENS):
        ids = torch.from_numpy(row.astype(np.int64))
        table = peer(ids[None]).logits[0, :-1].log_softmax(-1)
        losses.append(-table.gather(1, ids[1:, None]).sum())
    total = sum(losses)
    assert isinstance(total, torch.Tensor)
    total.backward()
    expected = np.concatenate([p.grad.numpy().ravel() for _, p in peer.named_parameters()])
    one = engine(model())
    assert relative(gradient(one, spec(), [rows]), expected) < 1e-5
    result = train(one, spec(), rows, denominator=50.0)
    assert result.loss == pytest.approx(total.item() / 50, rel=1e-6)
    assert result.gradient_norm == pytest.approx(np.linalg.norm(expected) / 50, rel=1e-5)


def test_the_step_is_the_one_torch_takes_with_the_clipped_gradient(
    engine: Any, model: Any, batch: Any, spec: Any, weights: Any
) -> None:
    one, rows = engine(model(), max_gradient_norm=0.5, weight_decay=0.1), batch(LENGTHS)
    step = one.begin_step(spec())
    step.accumulate(rows)
    parameters = {
        name: torch.nn.Parameter(p.detach().clone()) for name, p in one._started._updater.parameters.masters.items()
    }
    for name, p in one._started._updater.parameters.masters.items():
        parameters[name].grad = p.grad.clone() / 20.0
    torch.nn.utils.clip_grad_norm_(parameters.values(), 0.5)
    groups = [
        {"params": [p for p in parameters.values() if p.ndim == 2], "weight_decay": 0.1},
        {"params": [p for p in parameters.values() if p.ndim == 1], "weight_decay": 0.0},
    ]
    torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95)).step()
    assert step.finish(denominator=20.0).gradient_norm > 0.5
    for name, array in weights(one).items():
        np.testing.assert_allclose(array, parameters[name].detach().numpy(), rtol=1e-5, atol=1e-7)


def test_metrics_of_the_micro_batches_are_merged_by_their_reduction(engine: Any, batch: Any, spec: Any) -> None:
    one, rows = engine(), batch(LENGTHS)
    results = []
    for split in SPLITS:
        step = one.begin_step(spec())
        for part in parts_of(rows, split):
            step.accumulate(part)
        results.append(step.finish(denominator=0.0).metrics)
    tokens = sum(LENGTHS) - len(LENGTHS)
    for metrics in results:
        assert metrics["loss/tokens"].value == tokens
        assert metrics["loss/mean"].count == tokens
        assert metrics["loss/mean"].value == pytest.approx(results[0]["loss/mean"].value, rel=1e-5)
        assert metrics["loss/largest"].value == pytest.approx(results[0]["loss/largest"].value, rel=1e-5)


def test_one_step_at_a_time_and_none_after_its_end(engine: Any, batch: Any, spec: Any, tmp_path: Any) -> None:
    one = engine()
    step = one.begin_step(spec())
    with pytest.raises(ValueError, match="a training step is open"):
        one.begin_step(spec())
    with pytest.raises(ValueError, match="a training step is open"):
        one.save(str(tmp_path / "save"), kind="resume")
    with pytest.raises(ValueError, match="must be finite and at least 0"):
        step.finish(denominator=-1.0)
    step.finish(denominator=0.0)
    for late in (lambda: step.accumulate(batch([3])), lambda: step.finish(denominator=1.0)):
        with pytest.raises(ValueError, match="this training step is over"):
            late()
    one.begin_step(spec()).discard()


def test_bfloat16_trains_its_float32_masters(engine: Any, batch: Any, spec: Any, train: Any, gradient: Any) -> None:
    exact, rounded = engine(), engine(dtype="bfloat16", learning_rate=1e-5)
    rows = batch(LENGTHS)
    assert relative(gradient(rounded, spec(), [rows]), gradient(exact, spec(), [rows])) < 0.05
    halves = gradient(rounded, spec(), parts_of(rows, SPLITS[2]))
    assert relative(halves, gradient(rounded, spec(), [rows])) < 0.02
    masters = rounded._started._updater.parameters.masters
    before = {name: p.detach().clone() for name, p in masters.items()}
    assert train(rounded, spec(), rows).applied
    # A step far below bfloat16's resolution is not lost.
    moved = [float((p.detach() - before[name]).abs().max()) for name, p in masters.items()]
    assert all(p.dtype == torch.float32 for p in masters.values())
    assert all(5e-6 < distance < 2e-5 for distance in moved)


def test_training_lowers_the_loss(engine: Any, batch: Any, spec: Any, train: Any) -> None:
    for settings in ({"learning_rate": 3e-3}, {"optimizer": "muon", "learning_rate": 3e-3}, {"dtype": "bfloat16"}):
        one, rows = engine(**settings), batch(LENGTHS)
        losses = [train(one, spec(), rows, denominator=125.0).loss for _ in range(12)]
        assert losses[-1] < 0.85 * losses[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
        ({"max_gradient_norm": float("nan")}, "max_gradient_norm must be above 0"),
        ({"betas": (0.9, 1.0)}, "betas must be at least 0 and below 1"),
        ({"weight_decay": -0.1}, "weight_decay must be at least 0"),
        ({"warmup_steps": -1}, "warmup_steps must be at least 0"),
        ({"final_learning_rate_share": 1.5}, "final_learning_rate_share must be 0 to 1"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TorchTrainingSettings(**settings)
