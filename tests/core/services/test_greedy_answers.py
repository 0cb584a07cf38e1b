"""The greedy answer of each group: generated and stored as one of it, for its reward alone."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.contract import AlgorithmNeeds, Batch, Column, LossSpec, Prepared, Ragged, TrainingContext
from headrace.contract.columns import (
    ADVANTAGES,
    BEHAVIOUR_LOGPROBS,
    DENOMINATOR,
    GREEDY,
    GREEDY_REWARD,
    GROUP,
    LOSS_MASK,
    LOSS_WEIGHTS,
    REWARD,
    TOKENS,
    TRAINED,
    TRUNCATED,
    VERSION,
)
from headrace.registry import PluginSpec
from headrace.services.messages import PhaseSetup
from headrace.services.prepared import prepared
from headrace.services.training_phase import TrainingPhase
from headrace.testing.algorithm import FakeAlgorithm
from headrace.testing.training import FakeTrainingEngine, FakeTrainingSettings
from support.desk import Desk

GROUPS, SAMPLED = 2, 2
ROWS = GROUPS * (SAMPLED + 1)


class AgainstGreedy(FakeAlgorithm):
    """``seen``: what it was given."""

    seen: Batch

    @classmethod
    def needs(cls, settings: Any) -> AlgorithmNeeds:
        return AlgorithmNeeds(greedy_reward=True)

    def prepare(self, batch: Batch) -> Prepared:
        self.seen = batch
        mask, advantage = batch.ragged(LOSS_MASK), batch.dense(REWARD) - batch.dense(GREEDY_REWARD)
        weights = mask.like((np.repeat(advantage, mask.lengths) * mask.values).astype(np.float32))
        columns: Mapping[str, Column] = {
            LOSS_WEIGHTS: weights,
            ADVANTAGES: weights,
            DENOMINATOR: np.array([tokens.sum() for tokens in mask], dtype=np.float64),
        }
        return Prepared(columns=columns, trained=advantage != 0, metrics={})

    def loss(self, *, temperature: float) -> LossSpec:
        return LossSpec(function="headrace.testing.losses:weighted_likelihood", temperature=temperature)


def batch(rewards: list[float]) -> Batch:
    """Groups of two samples and a greedy answer, which is neither first nor last of the batch."""
    rows = np.arange(ROWS)
    tokens = Ragged.from_arrays([np.random.default_rng(row).integers(0, 16, 4 + row).astype(np.int32) for row in rows])
    mask = Ragged.from_arrays([np.arange(4 + row) > 1 for row in rows])
    whole = Batch(
        rows=rows,
        columns={
            TOKENS: tokens,
            LOSS_MASK: mask,
            BEHAVIOUR_LOGPROBS: tokens.like(np.zeros(len(tokens.values), np.float32)),
            REWARD: np.array(rewards, np.float32),
            GROUP: rows // (SAMPLED + 1),
            GREEDY: rows % (SAMPLED + 1) == SAMPLED,
            VERSION: np.full(ROWS, 3),
            TRUNCATED: np.zeros(ROWS, bool),
        },
    )
    return whole.take([5, 0, 2, 4, 1, 3])


REWARDS = [1.0, 0.0, 0.25, 0.5, 0.5, 0.5]


def test_an_algorithm_is_given_their_rewards_and_never_their_rows() -> None:
    algorithm = AgainstGreedy(None)
    columns, _ = prepared(algorithm, batch(REWARDS))
    assert algorithm.seen.rows.tolist() == [0, 4, 1, 3]
    assert algorithm.seen.dense(GREEDY_REWARD).tolist() == [0.25, 0.5, 0.25, 0.5]
    assert columns[TRAINED].tolist() == [False, True, False, False, True, False]  # type: ignore[union-attr]  # it is dense
    assert columns[DENOMINATOR].tolist() == [0, 2, 0, 6, 3, 5]  # type: ignore[union-attr]  # it is dense
    weights = columns[LOSS_WEIGHTS]
    assert isinstance(weights, Ragged)
    assert [row.tolist() for row in weights] == [
        [0.0] * 9,
        [0, 0, 0.75, 0.75],
        [0.0] * 6,
        [0.0] * 8,
        [0, 0, -0.25, -0.25, -0.25],
        [0.0] * 7,
    ]


def test_a_greedy_answer_that_could_not_be_scored_is_told_as_nan() -> None:
    algorithm = AgainstGreedy(None)
    prepared(algorithm, batch([1.0, 0.0, np.nan, 0.5, 0.5, 0.5]))
    assert np.isnan(algorithm.seen.dense(GREEDY_REWARD)).tolist() == [True, False, True, False]


@pytest.mark.parametrize("apart", [False, True], ids=["prepared here", "prepared apart"])
@pytest.mark.parametrize("mini_batches", [1, 4])
def test_they_are_never_trained_on_and_their_rewards_are_told(tmp_path: Path, apart: bool, mini_batches: int) -> None:
    algorithm, model = AgainstGreedy(None), str(tmp_path / "model")
    FakeTrainingEngine.create_model(model, settings={}, seed=1)
    engine = FakeTrainingEngine(FakeTrainingSettings())
    engine.start(TrainingContext(name="trainer", model_path=model, seed=0, threads=1, total_steps=10))
    unused = PluginSpec(role="algorithm", use="unused")
    setup = PhaseSetup(
        engine=unused,
        algorithm=unused,
        model_path=model,
        total_steps=10,
        temperature=1.0,
        stages=() if apart else ("advantage",),
        groups=GROUPS,
        streaming=False,
        lockstep=False,
        mini_batches=mini_batches,
        micro_batch_tokens=16,
    )
    phase, given = TrainingPhase(engine, algorithm, setup, dumps=tmp_path), batch(REWARDS)
    trained: list[int] = []
    begin = engine.begin_step

    def watched(loss: LossSpec) -> Any:
        step = begin(loss)
        accumulate = step.accumulate
        step.accumulate = lambda part: (trained.extend(part.rows.tolist()), accumulate(part))[1]  # type: ignore[method-assign]  # to see what it gets
        return step

    engine.begin_step = watched  # type: ignore[method-assign]  # to see what it begins
    if apart:
        given = given.with_columns(prepared(algorithm, given)[0])
    reply = phase.train(given, 4, last=True)
    assert sorted(trained) == [0, 1]
    assert reply.rewards == REWARDS
    assert reply.tokens == 5
    assert (reply.applied, reply.skipped) == ((1, 0) if mini_batches == 1 else (4, 0))


async def test_the_last_member_of_each_group_is_the_greedy_one() -> None:
    desk = await Desk(greedy=True, group_size=3).begin()
    item = await desk.work("w.0")
    assert item is not None
    assert [member.greedy for member in item.members] == [False, False, True]
    assert {member.task for member in item.members} == {0}
    plain = await (await Desk(group_size=3).begin()).work("w.0")
    assert plain is not None
    assert not any(member.greedy for member in plain.members)
