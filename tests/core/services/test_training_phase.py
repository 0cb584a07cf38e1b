"""A batch that comes in parts trains as one that comes whole."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import AlgorithmNeeds, Array, Batch, Prepared, Ragged, TrainingContext
from headrace.contract.columns import (
    BEHAVIOUR_LOGPROBS,
    GROUP,
    LOSS_MASK,
    REWARD,
    TOKEN_VERSIONS,
    TOKENS,
    TRUNCATED,
    VALUES,
    VERSION,
)
from headrace.registry import PluginSpec
from headrace.services.messages import PhaseSetup, TrainReply
from headrace.services.training_phase import TrainingPhase
from headrace.testing.algorithm import FakeAlgorithm
from headrace.testing.training import FakeTrainingEngine, FakeTrainingSettings

GROUPS, SIZE = 4, 2
NOT_USED = PluginSpec(role="algorithm", use="unused")


def phase(folder: Path, *, streaming: bool, mini_batches: int) -> TrainingPhase:
    model = folder / "model"
    FakeTrainingEngine.create_model(str(model), settings={}, seed=1)
    engine = FakeTrainingEngine(FakeTrainingSettings())
    engine.start(TrainingContext(name="trainer", model_path=str(model), seed=0, threads=1, total_steps=10))
    setup = PhaseSetup(
        engine=NOT_USED,
        algorithm=NOT_USED,
        model_path=str(model),
        total_steps=10,
        temperature=1.0,
        stages=("advantage",),
        groups=GROUPS,
        streaming=streaming,
        lockstep=False,
        mini_batches=mini_batches,
        micro_batch_tokens=16,
    )
    return TrainingPhase(engine, FakeAlgorithm(None), setup, dumps=folder)


def batch(groups: Sequence[int]) -> Batch:
    """Each row's numbers depend on its id alone."""
    rows = np.array([group * SIZE + member for group in groups for member in range(SIZE)])
    tokens = Ragged.from_arrays([np.random.default_rng(row).integers(0, 16, 6).astype(np.int32) for row in rows])
    mask = tokens.like(np.tile(np.arange(6) > 1, len(rows)))
    return Batch(
        rows=rows,
        columns={
            TOKENS: tokens,
            LOSS_MASK: mask,
            BEHAVIOUR_LOGPROBS: tokens.like(np.zeros(len(tokens.values), np.float32)),
            REWARD: (rows % 3).astype(np.float32),
            GROUP: rows // SIZE,
            VERSION: np.full(len(rows), 3),
            TRUNCATED: np.zeros(len(rows), bool),
        },
    )


def weights(trained: TrainingPhase) -> dict[str, Array]:
    assert isinstance(trained.engine, FakeTrainingEngine)
    return dict(trained.engine.model.tensors)


def train(trained: TrainingPhase, parts: Sequence[Sequence[int]]) -> TrainReply:
    for part in parts[:-1]:
        trained.train(batch(part), 4, last=False)
    return trained.train(batch(parts[-1]) if parts[-1] else None, 4, last=True)


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[2], [0, 3], [1]], [[3, 1], [0], [2], []]])
def test_however_a_batch_of_one_step_comes_the_step_is_the_same(tmp_path: Path, parts: list[list[int]]) -> None:
    whole = phase(tmp_path / "whole", streaming=False, mini_batches=1)
    streamed = phase(tmp_path / "streamed", streaming=True, mini_batches=1)
    first, second = train(whole, [[0, 1, 2, 3]]), train(streamed, parts)
    for name, tensor in weights(whole).items():
        np.testing.assert_allclose(weights(streamed)[name], tensor, rtol=1e-6)
    assert (second.applied, second.tokens) == (first.applied, first.tokens) == (1, first.tokens)
    assert second.rewards == first.rewards, "in the order of the rows, however they came"
    assert second.metrics["reward/mean"].value == pytest.approx(first.metrics["reward/mean"].value)
    assert second.metrics["staleness/mean"].value == 1.0


def test_a_step_is_taken_with_the_last_group_of_its_mini_batch_and_not_before(tmp_path: Path) -> None:
    streamed = phase(tmp_path, streaming=True, mini_batches=2)
    applied = [streamed.train(batch(part), 4, last=False).applied for part in ([3], [0, 2], [1])]
    assert applied == [0, 1, 2]
    assert streamed.train(None, 4, last=True).applied == 2
    assert streamed.train(batch([0]), 5, last=False).applied == 0, "the next batch begins anew"


def test_a_part_that_reaches_over_two_mini_batches_is_cut_between_groups(tmp_path: Path) -> None:
    cut, apart = (phase(tmp_path / name, streaming=True, mini_batches=2) for name in ("cut", "apart"))
    train(cut, [[0], [1, 2, 3]])
    train(apart, [[0, 1], [2, 3]])
    for name, tensor in weights(apart).items():
        np.testing.assert_allclose(weights(cut)[name], tensor, rtol=1e-6)


def test_staleness_is_that_of_rows_and_where_these_are_mixed_of_tokens_too(tmp_path: Path) -> None:
    """Every row has four sampled tokens; two of one row are one version newer, and of another two are masked."""
    whole = batch(range(GROUPS))
    versions = np.where(whole.ragged(LOSS_MASK).values, 3, -1).astype(np.int32).reshape(-1, 6)
    versions[0, 4:] = 4
    mask = whole.ragged(LOSS_MASK).values.reshape(-1, 6).copy()
    mask[1, 2:4] = False
    mixed = whole.with_columns(
        {
            TOKEN_VERSIONS: whole.ragged(TOKENS).like(versions.reshape(-1)),
            LOSS_MASK: whole.ragged(TOKENS).like(mask.reshape(-1)),
        }
    )
    metrics = {name: metric.value for name, metric in trained(tmp_path, mixed, version=5).metrics.items()}
    rows, tokens = GROUPS * SIZE, 4 * GROUPS * SIZE
    assert (metrics["staleness/mean"], metrics["staleness/max"]) == (2, 2)
    assert metrics["staleness/token_mean"] == pytest.approx((2 * tokens - 2) / tokens)
    assert metrics["staleness/mixed_share"] == pytest.approx(1 / rows)
    assert metrics["staleness/masked_share"] == pytest.approx(2 / tokens)
    plain = trained(tmp_path, whole, version=5).metrics
    assert not {"staleness/token_mean", "staleness/mixed_share", "staleness/masked_share"} & plain.keys()


def trained(folder: Path, whole: Batch, *, version: int) -> TrainReply:
    return phase(folder, streaming=False, mini_batches=1).train(whole, version, last=True)


class Valuing(FakeTrainingEngine):
    """Its values are the sum of the weights that give them."""

    def forward(self, batch: Batch, *, outputs: Any = ("logprobs",), weights: str = "current", **options: Any) -> Any:
        if outputs != ("values",):
            return super().forward(batch, outputs=outputs, weights=weights, **options)
        model = self.model if weights == "current" else self._snapshots[weights]
        total = sum(float(np.square(tensor).sum()) for tensor in model.tensors.values())
        mask = batch.ragged(LOSS_MASK)
        return {"values": mask.like(np.where(mask.values, total, 0).astype(np.float32))}


class Comparing(FakeAlgorithm):
    """Keeps the values that it was given."""

    given: list[Array]

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        return AlgorithmNeeds(min_group_size=2, values=True)

    def prepare(self, batch: Batch) -> Prepared:
        self.given.append(batch.ragged(VALUES).values[batch.ragged(LOSS_MASK).values])
        return super().prepare(batch)


@pytest.mark.parametrize(("streaming", "parts"), [(False, [[0, 1, 2, 3]]), (True, [[0, 1], [2, 3]])])
def test_values_come_first_and_are_of_the_weights_from_before_the_batch(
    tmp_path: Path, streaming: bool, parts: list[list[int]]
) -> None:
    """With a step between the two parts."""
    trained = phase(tmp_path, streaming=streaming, mini_batches=2)
    engine, algorithm = Valuing(FakeTrainingSettings()), Comparing(None)
    engine.start(
        TrainingContext(name="trainer", model_path=trained.setup.model_path, seed=0, threads=1, total_steps=10)
    )
    algorithm.given = []
    valued = TrainingPhase(engine, algorithm, trained.setup, dumps=tmp_path)
    before = sum(float(np.square(tensor).sum()) for tensor in engine.model.tensors.values())
    assert train(valued, parts).applied == 2
    np.testing.assert_allclose(np.concatenate(algorithm.given), before, rtol=1e-6)
    assert train(valued, parts).applied == 2
    assert np.ptp(np.concatenate(algorithm.given)) > 0, "the next batch is compared with newer values"
