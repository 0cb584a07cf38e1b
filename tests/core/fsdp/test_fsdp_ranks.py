"""The processes of ranks: orders that are refused, ranks that are lost, and nobody left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.contract import LossInputs, LossOutput, LossSpec, TrainingContext, TrainingStep
from headrace.errors import ConfigError, ContractError, EngineError
from headrace.testing.suites.trainees import LIKELIHOOD, Trainee, rows_of
from headrace_fsdp.leader import deal
from headrace_fsdp.training import FsdpTrainingEngine
from support.fsdp import others, started, wait_until_gone
from support.whole_runs import alive, descendants


def picky(inputs: LossInputs) -> LossOutput:
    """Raises where there is a row of 17 tokens, which is on one rank."""
    if inputs.sequence.bincount().max() == 16:
        raise ZeroDivisionError("a long row")
    return LossOutput(numerator=-(inputs.weights * inputs.logprobs).sum())


PICKY = LossSpec(function=f"{__name__}:picky")


@pytest.fixture(scope="module")
def two(tiny_model: str) -> Iterator[Trainee]:
    """Two ranks that whatever is refused must leave usable."""
    with started(tiny_model, ranks=2) as trainee:
        yield trainee


def test_rows_are_dealt_by_their_tokens() -> None:
    batch = rows_of([[0] * length for length in (9, 1, 8, 2, 7, 3)], prompt=1)
    assert [batch.take(share).ragged("tokens").lengths.sum() for share in deal(batch, 2)] == [15, 15]


def test_a_rank_without_rows_computes_along(two: Trainee) -> None:
    batch = two.batch()
    alone = two.engine.forward(batch.take([3]))["logprobs"].values
    assert np.allclose(alone, two.engine.forward(batch)["logprobs"][3], atol=1e-5)
    assert two.train(batch.take([3])).applied
    assert len(two.engine.forward(batch.take([]))["logprobs"]) == 0


def test_a_loss_that_raises_on_one_rank_is_raised_and_the_ranks_go_on(two: Trainee) -> None:
    batch = two.batch()
    step = two.engine.begin_step(PICKY)
    with pytest.raises((ZeroDivisionError, EngineError), match="a long row"):
        step.accumulate(batch)
    step.discard()
    expected = two.train(batch, denominator=0.0).metrics
    step = two.engine.begin_step(PICKY)
    step.accumulate(batch.take([0, 1]))
    step.discard()
    assert two.train(batch, denominator=0.0).metrics == expected


def test_what_a_batch_lacks_is_said_by_name_and_the_ranks_go_on(two: Trainee) -> None:
    unknown = rows_of([[0, 1], [0, two.vocabulary]], prompt=1)
    with pytest.raises(ContractError, match=f"token id {two.vocabulary}"):
        two.engine.forward(unknown)
    with pytest.raises(ContractError, match="keeps no critic"):
        two.engine.forward(two.batch(), outputs=("values",))
    step = two.engine.begin_step(LossSpec(function=LIKELIHOOD.function, columns=("absent",)))
    with pytest.raises(ContractError, match="needs column 'absent'"):
        step.accumulate(two.batch())
    step.discard()
    with pytest.raises(ContractError, match="cannot be imported"):
        two.engine.begin_step(LossSpec(function="no.such.module:loss"))
    with pytest.raises(ContractError, match="cannot be sent to other ranks"):
        two.engine.begin_step(LossSpec(function=LIKELIHOOD.function, settings={"odd": object()}))
    with pytest.raises(ConfigError, match="temperature"):
        two.engine.forward(two.batch(), temperature=0.0)
    with pytest.raises(ValueError, match="no snapshot 'never'"):
        two.engine.forward(two.batch(), weights="never")
    assert two.train(two.batch()).applied


def test_a_second_engine_in_a_process_is_refused(two: Trainee, tiny_model: str) -> None:
    with (
        pytest.raises(EngineError, match=r"in a process group of torch\.distributed already"),
        started(tiny_model, ranks=1),
    ):
        pass
    assert two.train(two.batch()).applied


def _train_on(trainee: Trainee, step: TrainingStep) -> None:
    while True:
        step.accumulate(trainee.batch())


@pytest.mark.parametrize("when", ["between orders", "in a step"])
def test_a_rank_that_is_killed_ends_the_engine_with_its_name(tiny_model: str, when: str) -> None:
    with started(tiny_model, ranks=2) as trainee:
        (lost,) = others(trainee.engine)
        step = trainee.engine.begin_step(LIKELIHOOD)
        os.kill(lost, signal.SIGKILL)
        if when == "between orders":
            wait_until_gone([lost])
        named = rf"rank 1 \(process {lost}\) was killed by SIGKILL"
        with pytest.raises(EngineError, match=named):
            _train_on(trainee, step)
        with pytest.raises(EngineError, match=named):
            trainee.weights()
        with pytest.raises(EngineError, match=named):
            step.discard()


def test_a_rank_that_is_stopped_ends_the_engine_after_the_deadline(tiny_model: str) -> None:
    with started(tiny_model, ranks=2, rank_deadline=2.0) as trainee:
        (stopped,) = others(trainee.engine)
        os.kill(stopped, signal.SIGSTOP)
        with pytest.raises(EngineError, match=rf"rank 1 \(process {stopped}\) did not answer .*is stopped"):
            trainee.train(trainee.batch())


def test_nobody_is_left_when_the_model_cannot_be_loaded(tmp_path: Path) -> None:
    engine = FsdpTrainingEngine(FsdpTrainingEngine.Settings(ranks=2))
    context = TrainingContext(name="trainer", model_path=str(tmp_path), seed=0, threads=1, total_steps=1)
    before = descendants(os.getpid())
    with pytest.raises(EngineError, match=r"no readable config\.json"):
        engine.start(context)
    assert set(alive(descendants(os.getpid()))) <= set(before)


OWNER = """
import sys
from support.fsdp import others, started
with started(sys.argv[1], ranks=2) as trainee:
    print(*others(trainee.engine), flush=True)
    while True:
        trainee.train(trainee.batch())
"""


def test_no_rank_outlives_an_engine_that_is_killed(tiny_model: str) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, tiny_model],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    )
    assert owner.stdout is not None
    ranks = [int(word) for word in owner.stdout.readline().split()]
    assert alive(ranks) == ranks
    owner.kill()
    owner.communicate()
    wait_until_gone(ranks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"ranks": 0}, "ranks must be at least 1"),
        ({"rank_deadline": 0.0}, "rank_deadline must be above 0"),
        ({"cpu_offload": True}, 'cpu_offload needs device = "cuda"'),
        ({"learning_rate": 0.0}, "learning_rate must be above 0"),
    ],
)
def test_a_setting_out_of_range_is_refused(settings: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FsdpTrainingEngine.Settings(**settings)
